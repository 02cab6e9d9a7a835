"""Writes scikit-learn's digits (1,797 pictures of 8 x 8) as tensors, for environments that have
only torch.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits


def main() -> None:
    digits = load_digits()
    images, target = torch.from_numpy(digits.images).float(), torch.from_numpy(digits.target).long()
    torch.save({"images": images, "target": target}, sys.argv[1])


if __name__ == "__main__":
    main()
