"""`splitmix64`: the published numbers, alike for an int, a tensor and an array."""

from __future__ import annotations

import numpy as np
import torch

from opintercept._values.splitmix import WORD, splitmix64


def test_splitmix64_makes_the_published_numbers() -> None:
    # The first numbers of https://prng.di.unimi.it/splitmix64.c for the seed 0.
    found = [splitmix64(number) for number in (1, 2, 3)]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_splitmix64_is_alike_for_ints_tensors_and_arrays() -> None:
    numbers = [0, 1, 2**40, 2**62 + 3, 2**63 - 1, -1, -(2**63)]
    expected = [splitmix64(number) for number in numbers]
    assert [each & WORD for each in splitmix64(torch.tensor(numbers)).tolist()] == expected
    assert splitmix64(np.array(numbers)).view(np.uint64).tolist() == expected
