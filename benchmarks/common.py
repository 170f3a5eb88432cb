import json, os, platform, datetime
from pathlib import Path
class Table:
    def __init__(self,*cols): self.rows=[cols]
    def add(self,*c): self.rows.append(c)
    def print(self):
        w=[max(len(str(r[i])) for r in self.rows) for i in range(len(self.rows[0]))]
        for r in self.rows: print("  ".join(str(c).rjust(x) for c,x in zip(r,w)))
def quick(): return os.environ.get("QUICK")=="1"
def write_results(name, rows): print(json.dumps(rows)[:200])
