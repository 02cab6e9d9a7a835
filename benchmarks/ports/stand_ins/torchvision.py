"""Stands in for torchvision where ports are tried: the names that the scripts use, made-up images.

Nothing of torchvision is needed, and nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

COUNT = 128  # images of a data set


class MNIST(torch.utils.data.Dataset[Any]):
    """Random images of digits."""

    def __init__(self, root: str, *, train: bool, transform: Any = None, download: bool = False):
        generator = torch.Generator().manual_seed(int(train))
        self.data = torch.randint(256, (COUNT, 28, 28), generator=generator, dtype=torch.uint8)
        self.targets = torch.arange(COUNT) % 10
        self._transform = transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self.data[index]), int(self.targets[index])


class FakeData(torch.utils.data.Dataset[Any]):
    """Random images of a size."""

    def __init__(self, *, image_size: tuple[int, ...], transform: Any):
        self._size, self._transform = image_size, transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Any, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.rand(self._size, generator=generator) * 2 - 1, index % 10


class Compose:
    """Transforms, one after the other."""

    def __init__(self, transforms: list[Any]):
        self._transforms = transforms

    def __call__(self, image: Tensor) -> Tensor:
        for transform in self._transforms:
            image = transform(image)
        return image


class ToTensor:
    """Bytes of an image to numbers from 0 to 1."""

    def __call__(self, image: Tensor) -> Tensor:
        return image[None].float() / 255


class Normalize:
    """A shift and a scale of all values."""

    def __init__(self, mean: tuple[float], std: tuple[float]):
        self._mean, self._std = mean[0], std[0]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self._mean) / self._std


def make_resnet(weights: None = None) -> nn.Module:
    """Make a small model whose first and last layers are called as those of a ResNet."""
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 64, 7), bn1=nn.BatchNorm2d(64), pool=pool, fc=nn.Linear(64, 9)
        )
    )


def find_model(name: str) -> Any:
    """Find a model: torchmetrics, which lightning imports, asks for many, and doesn't use them."""
    if name.startswith("__"):
        raise AttributeError(name)
    return make_resnet


def save_image(images: Tensor, path: str, **options: Any) -> None:
    """Write nothing."""


def _register_module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(f"torchvision.{name}")
    vars(module).update(contents)
    sys.modules[module.__name__] = module
    return module


datasets = _register_module("datasets", MNIST=MNIST, FakeData=FakeData)
transforms = _register_module("transforms", Compose=Compose, ToTensor=ToTensor, Normalize=Normalize)
models = _register_module("models", resnet18=make_resnet, __getattr__=find_model)
utils = _register_module("utils", save_image=save_image)
