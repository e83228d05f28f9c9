#!/bin/sh
# A wheel of someone else's project: torchsort, of which PyPI has the sources alone. Built, installed and used.
#
#     pip install ./torchwheels           # the command torchwheels
#     sh examples/foreign_wheel.sh    # needs Python 3.11 and g++; leaves the wheel in dist/
#
# `--backend local` runs the project's own code with your rights; without it, in a container. PyPI's torch has
# several gigabytes: PIP_EXTRA_INDEX_URL can name the index of smaller ones.
set -eu

torchwheels build torchsort==0.1.9 --target 3.11-cpu --backend local

python3.11 -m venv build/torchsort
build/torchsort/bin/pip install --quiet numpy==2.4.6 dist/torchsort-0.1.9+cpu.torch*-cp311-*.whl
build/torchsort/bin/python - <<'PROGRAM'
import torch, torchsort

# Sorting has no useful gradient; torchsort's ranks have one. It teaches five scores their order.
scores = torch.zeros(1, 5, requires_grad=True)
wanted = torch.tensor([[3.0, 1.0, 5.0, 2.0, 4.0]])
optimizer = torch.optim.SGD([scores], lr=0.1)
for step in range(101):
    loss = (torchsort.soft_rank(scores) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
print("ranks:", (scores.argsort().argsort() + 1).tolist())
PROGRAM
