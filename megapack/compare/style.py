"""The report's stylesheet. Light and dark follow the reader's system; system fonts only."""

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2430; --soft: #5b6675; --rule: #e3e7ec; --card: #f5f7fa;
  --c0: #9aa5b1; --c1: #2463c5; --c2: #16877a; --c3: #d9772b; --c4: #b9c0c9; --c5: #8a5cc2;
  --c6: #c43d53;
  --r0: #cfe3f7; --r1: #a3c9ee; --r2: #6fa8e0; --r3: #3f83cd; --r4: #2463c5; --r5: #184793;
  --r6: #10316a; --r7: #0a1f45; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #12161c; --ink: #e6eaf0; --soft: #9aa6b5; --rule: #2a323d; --card: #1a2029;
  --c0: #66717f; --c1: #5b9bf0; --c2: #35b5a4; --c3: #ee9650; --c4: #4b5563; --c5: #ae86e0;
  --c6: #e8667c;
  --r0: #16324f; --r1: #1d4878; --r2: #2660a3; --r3: #3a7fcc; --r4: #5b9bf0; --r5: #8ab8f5;
  --r6: #b4d2f9; --r7: #dbe9fc; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 48px 28px 72px; }
header { border-bottom: 1px solid var(--rule); padding-bottom: 18px; margin-bottom: 30px; }
h1 { font-size: 30px; line-height: 1.2; margin: 2px 0 10px; letter-spacing: -0.01em;
  overflow-wrap: anywhere; }
h2 { font-size: 21px; margin: 0 0 6px; letter-spacing: -0.005em; }
section { margin: 0 0 46px; }
section > p { color: var(--soft); max-width: 78ch; margin: 0 0 14px; }
.kicker { margin: 0; color: var(--soft); font-size: 13px; letter-spacing: 0.08em;
  text-transform: uppercase; }
.facts { margin: 0; color: var(--soft); word-spacing: 0.12em; }
.facts b { color: var(--ink); font-variant-numeric: tabular-nums; }
.note { color: var(--soft); font-size: 15px; margin: 10px 0 0; }
.answer { background: var(--card); border-left: 4px solid var(--c1); border-radius: 6px;
  padding: 20px 26px 18px; }
.answer h2 { font-size: 27px; color: var(--c1); margin: 0 0 14px; }
.answer h2 small { font-size: 15px; font-weight: 400; color: var(--soft); margin-left: 8px; }
.answer ul { margin: 16px 0 0; padding-left: 20px; }
.answer li { margin: 3px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; }
.tile { background: var(--paper); border: 1px solid var(--rule); border-radius: 6px;
  padding: 10px 14px; display: flex; flex-direction: column; }
.tile span { color: var(--soft); font-size: 13px; }
.tile b { font-size: 24px; line-height: 1.3; font-variant-numeric: tabular-nums; }
figure { margin: 0; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 720px; height: auto;
  font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
svg text { fill: var(--ink); }
svg .tick, svg .small { fill: var(--soft); font-size: 11.5px; }
svg .small { font-size: 10.5px; }
svg .name { fill: var(--soft); }
svg .head { font-weight: 600; font-size: 13.5px; }
svg .row { font-size: 13px; }
svg .chosen { font-size: 13px; font-weight: 700; fill: var(--c1); }
svg .value { font-size: 12px; font-variant-numeric: tabular-nums; }
svg .cut { font-weight: 700; fill: var(--paper); stroke: var(--ink); stroke-width: 0.4; }
.grid { stroke: var(--rule); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 4; }
.stem { stroke: var(--rule); stroke-width: 2; }
.link { stroke: var(--c0); stroke-width: 3; opacity: 0.6; }
.s3 { stroke: var(--c3); stroke-width: 2.2; fill: none; }
.c0 { fill: var(--c0); } .c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3); }
.c4 { fill: var(--c4); } .c5 { fill: var(--c5); } .c6 { fill: var(--c6); }
.faint2 { fill: var(--c2); opacity: 0.45; } .faint3 { fill: var(--c3); opacity: 0.45; }
.r0 { fill: var(--r0); } .r1 { fill: var(--r1); } .r2 { fill: var(--r2); } .r3 { fill: var(--r3); }
.r4 { fill: var(--r4); } .r5 { fill: var(--r5); } .r6 { fill: var(--r6); } .r7 { fill: var(--r7); }
svg .onr0, svg .onr1, svg .onr2 { fill: var(--ink); font-size: 11.5px; }
svg .onr3, svg .onr4, svg .onr5, svg .onr6, svg .onr7 { fill: var(--paper); font-size: 11.5px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 12.5px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 6px; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
tbody th { font-weight: 500; white-space: normal; min-width: 150px; }
th:first-child { text-align: left; }
thead th { vertical-align: bottom; font-weight: 600; border-bottom: 1.5px solid var(--soft); }
thead small { display: block; color: var(--soft); font-weight: 400; font-size: 11px; }
tr.chosen { background: var(--card); } tr.chosen th { color: var(--c1); font-weight: 700; }
tr.out th { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 8px 22px; margin: 0 0 16px; }
dt { font-weight: 600; } dd { margin: 0; }
dd small { display: block; color: var(--soft); max-width: 80ch; }
footer { border-top: 1px solid var(--rule); padding-top: 14px; color: var(--soft);
  font-size: 14px; }
footer p { margin: 4px 0; } code { overflow-wrap: anywhere; font-size: 13px; }
@media print { section { break-inside: avoid; } }
"""
