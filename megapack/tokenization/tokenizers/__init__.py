"""Blocks of documents -> tokens.

- tokenizer: what a tokenizer is, its files and special tokens
- encoders: who runs it, and reads ids back; probe: which backend gives the reference's ids
- coding: text and conversations -> tokens as they are stored, and labels; template_chats: the
  conversations as their tokenizer's publisher writes them; chat_template: how its template runs
- train: a new tokenizer
"""
