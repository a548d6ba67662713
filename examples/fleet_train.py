"""A training script to profile: generated images, real loading processes, real decoding.

    partita fleet profile -b 32 --max-iterations 20 examples/fleet_train.py --data images

Images are PNG files, written on the first run. Loaders read, decode, crop, resize and normalise
them; a small network is trained on what they give. With ``--emulate-step MS`` a sleep stands for
the step of an accelerator, during which the CPUs are free for the loaders; the output says so.
"""

import argparse
import os
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from partita.fleet.report import SpeedMeter

CLASSES = 10
CROP = 96


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write an RGB image as a PNG whose rows hold differences to the pixel on their left."""
    height, width, _ = pixels.shape
    rows = pixels.copy()
    rows[:, 1:] -= pixels[:, :-1]
    lines = np.concatenate([np.full((height, 1), 1, np.uint8), rows.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, body in parts:
            check = struct.pack(">I", zlib.crc32(name + body))
            file.write(struct.pack(">I", len(body)) + name + body + check)


def read_png(path: Path) -> np.ndarray:
    """Return the pixels of an image that ``write_png`` wrote."""
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    (size,) = struct.unpack(">I", data[33:37])
    lines = np.frombuffer(zlib.decompress(data[41 : 41 + size]), np.uint8).reshape(height, -1)
    return np.cumsum(lines[:, 1:].reshape(height, width, 3), axis=1, dtype=np.uint8)


def generate(folder: Path, count: int, size: int) -> None:
    """Write images of ten classes, unless they are there; the folder appears when all are."""
    if folder.exists():
        return
    rng = np.random.default_rng(0)
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    unfinished.mkdir(parents=True)
    across = np.linspace(0, 6, size)
    for index in range(count):
        label = index % CLASSES
        wave = 90 * np.sin(across[:, None] * (label + 1)) * np.cos(across[None] * (10 - label))
        pixels = 128 + wave[:, :, None] + rng.normal(0, 12, (size, size, 3))
        write_png(unfinished / f"{index:06d}-{label}.png", pixels.clip(0, 255).astype(np.uint8))
    unfinished.rename(folder)


class Images(Dataset[tuple[Tensor, int]]):
    """The images of a folder, decoded and augmented when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.png"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        image = torch.from_numpy(read_png(path)).permute(2, 0, 1).float().div(255)
        side = int(torch.randint(CROP, image.shape[1] + 1, ()))
        top, left = (int(torch.randint(0, image.shape[1] - side + 1, ())) for _ in range(2))
        image = image[:, top : top + side, left : left + side]
        image = nn.functional.interpolate(
            image[None], (CROP, CROP), mode="bilinear", antialias=True, align_corners=False
        )[0]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        image = (image - image.mean()) / (image.std() + 1e-3)
        return image, int(path.stem.rpartition("-")[2])


def network() -> nn.Module:
    """Return a small network for images."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def options() -> argparse.Namespace:
    """Return the options: those of the contract, and our own."""
    parser = argparse.ArgumentParser(description="Train a small network on generated images.")
    parser.add_argument("--data", default="images", help="folder of the images")
    parser.add_argument("-b", "--batch", type=int, default=32)
    parser.add_argument("-j", "--workers", type=int, default=1)
    parser.add_argument("--max_iterations", "--max-iterations", type=int, default=100)
    parser.add_argument("--images", type=int, default=512, help="how many to generate")
    parser.add_argument("--size", type=int, default=256, help="of an image, in pixels")
    parser.add_argument("--emulate-step", type=float, default=0.0, help="milliseconds to sleep")
    return parser.parse_args()


def main() -> None:
    """Train for a number of iterations and report the speed."""
    args = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the step is small: CPUs are for the loaders
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    folder = Path(args.data) / "train"
    if rank == 0:
        generate(folder, args.images, args.size)
    if world > 1:
        torch.distributed.barrier()
    images = Images(folder)
    sampler = DistributedSampler(images) if world > 1 else None
    loader = DataLoader(
        images, args.batch, shuffle=sampler is None, sampler=sampler, num_workers=args.workers
    )
    model = network()
    trained = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    meter = SpeedMeter(warmup=min(4, args.max_iterations // 4), every=1)
    done, loss = 0, torch.zeros(())
    while done < args.max_iterations:
        for pixels, labels in loader:
            loss = nn.functional.cross_entropy(trained(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.emulate_step / 1000)
            meter.step()
            done += 1
            if done == args.max_iterations:
                break
    emulated = " (step emulated)" if args.emulate_step else ""
    print(f"{done} iterations, loss {float(loss):.3f}, {meter.iteration_s:.4f} s each{emulated}")
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
