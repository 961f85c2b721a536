"""Qwen in and out: Hugging Face checkpoints read into Longpitch's layers, and written from them.

`names` says which tensors make up which, `config` does the same for config.json, `importer` and `exporter` convert,
`tokenizer` carries the files of the tokenizer along, `modeling_longpitch` travels with exported L2A models.
"""
