"""Blocks of documents -> tokens.

- tokenizer: what a tokenizer is, its files and special tokens (gpt2: vocab.json and merges.txt)
- encoders: who runs it, and reads ids back (``Encoder.decode``); guard: two backends as one; probe:
  which of them gives the reference's ids
- coding: text -> tokens as they are stored; chat, chat_template and rendering (of a
  template, as transformers does): conversations -> tokens and labels
- train: a new tokenizer
"""
