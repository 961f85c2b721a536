"""These tests are collected only where torch sees a GPU; TRAIN_ON=cpu collects test_training.py without one."""

import os

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_[!t]*"] if os.environ.get("TRAIN_ON") == "cpu" else ["*"]
