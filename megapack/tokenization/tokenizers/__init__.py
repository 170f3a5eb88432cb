"""Blocks of documents -> tokens.

- tokenizer: the files of a tokenizer, its special tokens; vocabulary: text and id of each token
- encoders: one class per backend; probe, verified: check that a backend gives the reference's ids
- coding: text and conversations -> stored tokens and labels
- template_chats: conversations through the tokenizer's chat template; chat_template: the template
- limited: runs code in a child process with limits on CPU time and memory
- train: trains a new tokenizer
"""
