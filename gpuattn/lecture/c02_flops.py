"""2. Count FLOPs: backward is twice forward

Claim: a product of B rows with an N x H matrix takes 2 B N H FLOPs forward, and twice that
backward.
Regime: compute
Question: A layer computes y = x W. Its backward pass returns dx and dW. How many matrix products
is that, and how much more work than the forward pass?
Answer: Two, dx = dy W^T and dW = x^T dy. Each pairs the same three sizes B, N and H, so each takes
2 B N H FLOPs: backward is twice forward, and a step three times.
Vary: python -m gpuattn.lecture.c02_flops layers=8 width=128
"""

# %%
import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted

say = lecture(__doc__)
# %% [markdown]
# The chain rule on three numbers, by the tape. v = w1 w2 is computed once and used again.
# %%


def loss(w1, w2, w3):
    return 2 * (w1 * w2) * w3


gradients = gpuattn.grad(loss, argnums=(0, 1, 2))(*(say.array(w) for w in (3, 4, 5)))
d1, d2, d3 = (int(d) for d in gradients)
say.exact("E01", "dL/dw1 = 2 w2 w3 at (3, 4, 5)", d1)
say.exact("E01", "dL/dw2 = 2 w1 w3 at (3, 4, 5)", d2)
say.differs("E01", "dL/dw3 at (3, 4, 5)", d3)
# %% [markdown]
# One layer: what the ops are asked to do while they run, 2 m n k for each product.
# %%
B, N, H = 46, 64, 768
x, weight = (gpuattn.Tensor(say.normal(*shape), requires_grad=True) for shape in ((B, N), (H, N)))
with counted.ops() as calls:
    gpuattn.linear(x, weight).sum().backward()
forward, backward = (
    int(sum(call.flops for call in calls if call.direction == direction))
    for direction in ("forward", "backward")
)
say.exact("E02", "forward, B = 46, N = 64, H = 768", forward)
say.exact("E02", "backward, B = 46, N = 64, H = 768", backward)
say.differs("E02", "forward FLOPs over B N H", forward / (B * N * H))
# %% [markdown]
# One row, as in a recurrent network: the same count in plain loops, and that of a single thread.
# %%
d = 256
row, matrix, by_thread = [counted.Number(1)] * d, [[counted.Number(2)] * d] * d, []
for column in range(d):  # a thread for each number of the result
    counted.Number.flops, total = 0, counted.Number(0)
    for i in range(d):
        total = total + row[i] * matrix[i][column]
    by_thread.append(counted.Number.flops)
say.exact("B04", "FLOPs at d = 256", sum(by_thread))
say.exact("B04", "FLOPs of a thread at d = 256", max(by_thread))
# %% [markdown]
# A whole step of a small GPT-2, op by op. The backward pass of attention takes 2.5 times the FLOPs
# of its forward pass, not twice: it also computes the scores again (chapter 10).
# %%
layers, width = say.size("layers", 2, 1), say.size("width", 64, 32)
config = gpuattn.models.GPT2Config(vocab=512, d_model=width, heads=4, layers=layers, block=64)
tokens = say.rng.integers(0, 512, (4, 65))
model = gpuattn.models.GPT2(config)
with counted.ops() as calls:
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
bars: dict[str, float] = {}
for call in calls:
    if call.flops:
        name = f"{call.op}, {call.direction}"
        bars[name] = bars.get(name, 0) + call.flops / 1e6
say.bars("FLOPs of a step of a small GPT-2, as counted while it ran", bars, "MFLOP")
