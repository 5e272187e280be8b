"""Which arithmetic devices may use, by torch's settings."""

from __future__ import annotations

from typing import Any

import pytest
import tensor_cores
import torch

from opintercept._values.precision import convolution_precision, product_precision, reduced_sums

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("name", "cuda", "cpu"), [("highest", "highest", "highest"), ("medium", "tf32", "bf16")])
def test_the_precision_of_products_is_that_of_the_device(name: str, cuda: str, cpu: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        assert (product_precision(CUDA), product_precision(CPU)) == (cuda, cpu)
    finally:
        torch.set_float32_matmul_precision(before)


def test_convolutions_have_a_setting_of_their_own() -> None:
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = conv.fp32_precision
    try:
        for setting, expected in (("tf32", "tf32"), ("ieee", "highest")):
            conv.fp32_precision = setting
            with tensor_cores.settings(fp32_precision="ieee"):
                assert (convolution_precision(CUDA), product_precision(CUDA)) == (expected, "highest")
    finally:
        conv.fp32_precision = before


def test_sums_in_few_bits_are_those_that_the_settings_of_cuda_allow() -> None:
    fp16, bf16 = "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"
    with tensor_cores.settings(**{fp16: True, bf16: True, "allow_fp16_accumulation": True}):
        assert reduced_sums(torch.float16, CUDA) == (fp16, "allow_fp16_accumulation")
        assert reduced_sums(torch.bfloat16, CUDA) == (bf16,)
        assert reduced_sums(torch.float32, CUDA) == reduced_sums(torch.float16, CPU) == ()
        with tensor_cores.settings(**{fp16: (False, False), bf16: False}):
            assert reduced_sums(torch.float16, CUDA) == ("allow_fp16_accumulation",)
            assert reduced_sums(torch.bfloat16, CUDA) == ()
