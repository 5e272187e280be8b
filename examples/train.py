"""Training of three steps, for `opintercept run` and `opintercept diff`. With `--round`, one weight is rounded.

python examples/train.py
"""

import sys

import torch

torch.manual_seed(0)
block = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = torch.nn.Sequential(block, torch.nn.Linear(32, 8))
if "--round" in sys.argv:
    with torch.no_grad():
        block.linear2.weight.copy_(block.linear2.weight.bfloat16())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 10, 32)).square().mean().backward()
    optimizer.step()
