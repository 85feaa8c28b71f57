"""Triton kernels of the draw of ``sampler.sample`` without truncation: three passes over the logits, nothing else written.

The first finds the largest logit of each chunk of a row, the second the integer mass of each chunk, the third the chunk
in which the row's uniform lands, and the token within it.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.jit
def _policy_logits(logits, blocked, temperature, stop_masked, row, place, VOCAB: tl.constexpr):
    """Logits of the policy at places of a row: divided by the temperature, what may not be drawn at -inf."""
    inside = place < VOCAB
    x = tl.load(logits + row * VOCAB + place, mask=inside, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperature + row).to(tl.float32)
    kind = tl.load(blocked + place, mask=inside, other=1)
    gone = (kind == 1) | ((kind == 2) & (tl.load(stop_masked + row) > 0)) | (place >= VOCAB)
    return tl.where(gone, float("-inf"), x)


@triton.jit
def largest_logits(
    logits, blocked, temperature, stop_masked, largest, where,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _policy_logits(logits, blocked, temperature, stop_masked, row, place, VOCAB)
    # A logit that is not finite spoils its row: the log-prob must say so.
    spoiled = tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0
    tl.store(largest + row * CHUNKS + chunk, tl.where(spoiled, float("nan"), tl.max(x, 0)))
    tl.store(where + row * CHUNKS + chunk, (chunk * CHUNK + tl.argmax(x, 0)).to(tl.int64))


@triton.jit
def _row_largest(largest, row, CHUNKS: tl.constexpr, C: tl.constexpr):
    c = tl.arange(0, C)
    found = tl.load(largest + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    spoiled = tl.sum((found != found).to(tl.int32), 0) > 0
    return tl.where(spoiled, float("nan"), tl.max(tl.where(found != found, float("-inf"), found), 0))


@triton.jit
def _integer_weights(x, top, SCALE: tl.constexpr):
    shifted = x - top
    return tl.where(shifted == shifted, tl.exp(shifted) * SCALE, 0.0).to(tl.int64)


@triton.jit
def chunk_mass(
    logits, blocked, temperature, stop_masked, largest, mass,
    SCALE: tl.constexpr, LOG_SCALE: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    top = _row_largest(largest, row, CHUNKS, C)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _policy_logits(logits, blocked, temperature, stop_masked, row, place, VOCAB)
    tl.store(mass + row * CHUNKS + chunk, tl.sum(_integer_weights(x, top, SCALE), 0))


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def draw_tokens(
    logits, blocked, temperature, stop_masked, largest, where, mass, keys, greedy, tokens, positions, lengths, counts,
    packed, stride,
    SCALE: tl.constexpr, LOG_SCALE: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The draw of ``sampler.sample`` and ``randomness.uniforms``, then the row moves on."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    sums = tl.load(mass + row * CHUNKS + c, mask=c < CHUNKS, other=0)
    total = tl.sum(sums, 0)
    count = tl.load(counts + row)
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    state = _mix(tl.load(keys + row).to(tl.uint64)) + (count + 1).to(tl.uint64) * golden
    uniform = ((_mix(state) >> 12).to(tl.float64) + 0.5) * (2.0**-52)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    running = tl.cumsum(sums, 0)
    chunk = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), CHUNKS - 1)
    before = tl.sum(tl.where(c < chunk, sums, 0), 0)
    top = _row_largest(largest, row, CHUNKS, C)
    place = tl.arange(0, CHUNK)
    x = _policy_logits(logits, blocked, temperature, stop_masked, row, chunk * CHUNK + place, VOCAB)
    within = tl.cumsum(_integer_weights(x, top, SCALE), 0)
    drawn = chunk * CHUNK + tl.sum((within <= target - before).to(tl.int32), 0)
    best = tl.load(largest + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    best_chunk = tl.argmax(tl.where(best != best, float("-inf"), best), 0)
    is_greedy = tl.load(greedy + row) > 0
    token = tl.where(is_greedy, tl.load(where + row * CHUNKS + best_chunk), drawn.to(tl.int64))
    token = tl.minimum(token, VOCAB - 1)
    chosen = tl.load(logits + row * VOCAB + token).to(tl.float32) / tl.load(temperature + row).to(tl.float32)
    logprob = (chosen - top).to(tl.float64) + LOG_SCALE - tl.log(total.to(tl.float64))
    tl.store(packed + row, token.to(tl.float64))
    tl.store(packed + stride + row, logprob)
    tl.store(packed + 2 * stride + row, tl.where(is_greedy, 0.0, logprob))
    tl.store(tokens + row, token)
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(lengths + row, tl.load(lengths + row) + 1)
    tl.store(counts + row, count + 1)
