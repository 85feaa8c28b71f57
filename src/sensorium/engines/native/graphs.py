"""The device half of decoding: one step over rows at fixed addresses, and a CUDA graph of it for each of a few buckets."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from sensorium.engines.native.decode_state import DecodeRows, DecodeState, RowLayout, TorchOps, read_again
from sensorium.engines.native.fp8 import FEW_ROWS, OFF, Fp8Step, KernelProducts, TorchProducts, refuse_without_fp8
from sensorium.engines.native.key_values import PAGE, PagedPrefill, PagePool, page_table, write_tokens
from sensorium.engines.native.prefix_cache import RouteRecorder, recording_routes
from sensorium.kernels.device_code import NoDeviceCode
from sensorium.kernels.first_use import compiling, fall_back, note_fallback
from sensorium.kernels.layer_ops import (
    GatedMLP,
    LayerParts,
    MixerParts,
    NormWeights,
    UnknownLayer,
    decoded_parts,
    has_mixer,
    mixer_norm,
    norm_of,
    parts_of,
    product_of,
)
from sensorium.kernels.matched_ops import KeyStore, MatchedOps, QueryTiles, queries_of_tile
from sensorium.models.delta_net import DeltaTokens
from sensorium.models.policy import Policy
from sensorium.vocabulary.errors import EngineError

# row 0: pages 4 5 7, 150 entries, one new token     a tile of one query that sees entries 0-149 and itself
# row 1: pages 4 5 8, nothing held, 130 new tokens   tiles of at most 8 queries (8 heads a key head): 0-7, 8-15, …


class MatchedPrefill(PagedPrefill):
    """New tokens of some rows, as ``PagedPrefill``, in tiles."""

    def __init__(
        self,
        pool: PagePool,
        pages: Sequence[Sequence[int]],
        held: Sequence[int],
        new: Sequence[int],
        ops: MatchedOps,
    ) -> None:
        super().__init__(pool, pages, held, new)
        self._ops, self._held, self._new = ops, list(held), list(new)
        self._entries = _entries(page_table(pages, max(held) + max(new)), pool.block.shape[3]).to(pool.block.device)
        self._tiles: QueryTiles | None = None

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [B, T, H, D]."""
        self.store(layer, key_BKTD, value_BKTD)
        if self._tiles is None:
            self._tiles = self._cut(query_BHTD.shape[1], key_BKTD.shape[1])
        query_BTHD = query_BHTD.transpose(1, 2)
        out = self._ops.attend(query_BTHD.flatten(0, 1), _store(self._block[layer]), self._tiles, scaling)
        return out.view_as(query_BTHD)

    def _cut(self, heads: int, kv_heads: int) -> QueryTiles:
        width, reach, each = max(self._new), self._entries.shape[1], queries_of_tile(heads, kv_heads)
        tiles = [
            (row * width + start, min(each, new - start), row * reach, held + start)
            for row, (held, new) in enumerate(zip(self._held, self._new, strict=True))
            for start in range(0, new, each)
        ]
        first, count, base, place = torch.tensor(tiles).T.contiguous().to(self._entries.device).unbind()
        return QueryTiles(first, count, base, place, self._entries.flatten())


class MatchedStep:
    """A decode step through the layers that the learner runs."""

    name = "matched layers"

    def __init__(self, policy: Policy) -> None:
        assert policy.matched is not None
        self._policy, self._ops = policy, policy.matched

    def logits(self, rows: DecodeRows, pool: PagePool) -> Tensor:
        """The logits after every row's last token, whose keys and values are written."""
        positions_3B1 = rows.positions_B[None, :, None].expand(3, -1, 1)
        attention = _RowTiles(rows, pool, self._ops)
        hidden_B1H = self._policy.language(rows.tokens_B[:, None], positions_3B1, attention)
        return self._policy.logits(hidden_B1H[:, 0])


class _RowTiles:
    """One new token per row, each a tile of its own."""

    def __init__(self, rows: DecodeRows, pool: PagePool, ops: MatchedOps) -> None:
        self._pool, self._ops = pool, ops
        reach = rows.table_BP.shape[1] * PAGE
        place_B = rows.lengths_B.clamp(max=reach - 1)  # a row past its last page writes where nobody reads
        row_B = torch.arange(len(place_B), device=place_B.device)
        self._page_B = rows.table_BP.long().gather(1, (place_B // PAGE)[:, None])[:, 0]
        self._offset_B = place_B % PAGE
        entries_BS = _entries(rows.table_BP.long(), pool.block.shape[3])
        self._tiles = QueryTiles(row_B, torch.ones_like(row_B), row_B * reach, place_B, entries_BS.flatten())

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        block = self._pool.block[layer]
        for pages_NKPD, new_BKTD in zip(block.unbind(0), (key_BKTD, value_BKTD), strict=True):
            write_tokens(new_BKTD[:, :, 0], pages_NKPD, self._page_B, self._offset_B)
        return self._ops.attend(query_BHTD[:, :, 0], _store(block), self._tiles, scaling)[:, None]


def _entries(table_BP: Tensor, kv_heads: int) -> Tensor:
    """Where the entries of rows begin in their layer's keys, in units of the head size: [B, P · PAGE]."""
    return (table_BP[:, :, None] * (kv_heads * PAGE) + torch.arange(PAGE, device=table_BP.device)).flatten(1)


def _store(layer_block: Tensor) -> KeyStore:
    keys_NKPD, values_NKPD = layer_block.unbind(0)
    _, kv_heads, page, size = keys_NKPD.shape
    return KeyStore(keys_NKPD, values_NKPD, kv_heads, size, page * size)


# Two ways that give the same. ``StockStep`` calls the decoder layers of transformers as they are. ``FusedStep`` calls
# their linear layers and does what lies between with ``decode_state`` or ``decode_kernels``: 10 to 14 launches a layer
# instead of 60. Its residual stream is float32, as in the learner's fused layers. Nothing in a step reads a tensor's
# value on the host, so it can be captured in a CUDA graph.


class StockStep:
    """The step through the stock layers, attention by ``ops``."""

    name = "stock layers"
    stock = True

    def __init__(self, policy: Policy, ops: TorchOps) -> None:
        self._policy = policy
        self._ops = ops

    def logits(self, rows: DecodeRows, pool: PagePool) -> Tensor:
        """The logits after every row's last token, whose keys and values are written."""
        positions_3B1 = rows.positions_B[None, :, None].expand(3, -1, 1)
        attention = _RowAttention(rows, pool, self._ops)
        hidden_B1H = self._policy.language(rows.tokens_B[:, None], positions_3B1, attention, stock=self.stock)
        return (self._policy.adapter.head if self.stock else self._policy.head_logits)(hidden_B1H[:, 0])


class LayerStep(StockStep):
    """The step of a model whose layers have norms after each half (GLM-4V), through the learner's fused layers."""

    name = "fused layers"
    stock = False


class _RowAttention:
    """One new token per row, for stock layers, which rotate queries and keys themselves."""

    def __init__(self, rows: DecodeRows, pool: PagePool, ops: TorchOps) -> None:
        self._rows, self._pool, self._ops = rows, pool, ops

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        block = self._pool.block[self._pool.places[layer]]
        self._ops.write(key_BKTD[:, :, 0], value_BKTD[:, :, 0], self._rows, block)
        batch, heads, _, size = query_BHTD.shape
        out = self._ops.attend(query_BHTD[:, :, 0].contiguous(), self._rows, block, scaling)
        return out.view(batch, 1, heads, size)

    def delta(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """[B, 1, G, V] of a delta net; the states in the rows' slots advance."""
        place, states = self._pool.places[net.layer_idx], self._pool.states
        return self._ops.delta(net, tokens, states.windows[place], states.states[place], self._rows.slots_B)


class FusedStep:
    """The step through the linear layers of the stock modules. Refuses with ``UnknownLayer`` what it does not know."""

    name = "fused layers"

    def __init__(self, policy: Policy, ops: TorchOps) -> None:
        self._policy = policy
        self._ops = ops
        model = policy.adapter.language_model
        mixed = any(has_mixer(layer) for layer in model.layers)
        self._layers = [decoded_parts(layer) if mixed else parts_of(layer) for layer in model.layers]
        self._last = (mixer_norm if mixed else norm_of)(model.norm)

    def logits(self, rows: DecodeRows, pool: PagePool) -> Tensor:
        """The logits after every row's last token, whose keys and values are written."""
        policy, ops = self._policy, self._ops
        sum_BW, normed_BW, angles = ops.begin(policy, rows, self._layers[0].before)
        following = [*(layer.before for layer in self._layers[1:]), self._last]
        for layer, place, norm in zip(self._layers, pool.places, following, strict=True):
            if isinstance(layer, MixerParts):
                net: Any = layer.mixer
                windows_NWC, states_NGKV = pool.states.windows[place], pool.states.states[place]
                waiting = pool.states.waiting(place) if ops.defers else None
                seen_BN = ops.mix(net, normed_BW, windows_NWC, states_NGKV, rows.slots_B, waiting)
                normed_BW, sum_BW = ops.add_product(product_of(net.out_proj), seen_BN, sum_BW, layer.between)
            else:
                query = ops.project(layer, normed_BW, angles, rows, pool.block[place])
                seen_BN = ops.attend(query, rows, pool.block[place], layer.scaling)
                fine = torch.float16 if layer.fine else None
                normed_BW, sum_BW = ops.add_product(layer.out, seen_BN, sum_BW, layer.between, fine)
            normed_BW, sum_BW = self._inner(layer, normed_BW, sum_BW, norm)
        if pool.states and ops.defers:
            pool.states.count(rows.slots_B)
        return policy.head_logits(normed_BW)

    def _inner(
        self, layer: LayerParts | MixerParts, x_BW: Tensor, sum_BW: Tensor, norm: NormWeights
    ) -> tuple[Tensor, Tensor]:
        """A gated MLP in three products; anything else (experts) as the module it is. The next norm, and the sum."""
        inner, ops = layer.inner, self._ops
        if isinstance(inner, GatedMLP):
            return ops.add_product(inner.down, ops.gated(inner, x_BW), sum_BW, norm)
        return ops.add_norm(inner(x_BW[:, None])[:, 0], sum_BW, norm)


# A batch of n rows runs in the smallest bucket that holds it; the rest of the bucket is padding that works on the
# scratch page. The fused step is compared with the stock one on the first batch it meets. Where they disagree, or a
# step cannot be captured (experts whose routing is read on the host, say), the slower way is taken, with a warning that
# says why.


BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512)
# How far the logits of the fused step may be from those of the stock one, relative to the largest logit.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 0.01}
# Farther for matched layers and hybrid models. The check is for kernels that are wrong, and in bfloat16 the stock layers
# round their residual stream: matched layers of a tiny model with adapters were 0.043 off them. On an H200 probabilities of
# a hybrid (Qwen3.5 4B's shape) differ by 4.8 % between engine and learner, those of Qwen2.5-VL-3B's shape by 1 %.
WIDER = 2.5
# How far what a layer with an FP8 MLP adds may be from plain torch on the same inputs. Roundings give 0.03, a wrong tile of
# the 86 that an MLP's inner values have 0.1, a wrong kernel about 1.
FP8_BOUND = 0.06
_CAPTURING = Lock()
LEAST_PAGES = 4
MOST_PAGES = 64  # that a table has room for from the start: 4,096 tokens of a row


def first_pages(max_context: int, device: torch.device) -> int:
    """Pages of a row in the first table. A wider one means new graphs, so on CUDA it holds the whole context if it can."""
    if device.type != "cuda" or find_spec("triton") is None:
        return LEAST_PAGES  # plain torch reads the whole table
    return max(LEAST_PAGES, min(MOST_PAGES, -(-max_context // PAGE)))


def bucket_of(rows: int) -> int:
    """The size of the bucket that so many rows run in."""
    return next((size for size in BUCKETS if size >= rows), -(-rows // 128) * 128)


def buckets_to_capture(bucket: int, captured: Collection[int]) -> list[int]:
    """The buckets to capture when a batch comes to one that has no graph.

    (128, {}) → [128]: rows of equal length need no other. (96, {128}) → [96, 64, 48, …, 1]: lengths differ, so later
    rollouts will pass through buckets that this one skips; they are captured now, and no later rollout waits for them.
    """
    smaller = [size for size in reversed(BUCKETS) if size < bucket] if any(size > bucket for size in captured) else []
    return [size for size in (bucket, *smaller) if size not in captured]


class DecodeRunner:
    """Runs decode steps. ``fast=False`` is the reference: stock layers, plain torch, no graph.

    ``compile`` lets attention of few rows be one launch (``decode_kernels.RowAttention``).
    """

    def __init__(
        self,
        policy: Policy,
        pool: PagePool,
        forbidden_F: Tensor,
        stop_S: Tensor,
        max_rows: int,
        fast: bool,
        max_context: int = LEAST_PAGES * PAGE,
        compile: bool = False,
        recorder: RouteRecorder | None = None,
        quantization: str = "none",
    ) -> None:
        self._recorder = recorder
        self._fp8 = quantization == "fp8"
        self.notes: list[str] = []
        self.noted: Callable[[str], None] | None = None
        self.captured = 0
        self._policy, self._pool = policy, pool
        self._forbidden_F, self._stop_S = forbidden_F, stop_S
        self._max_rows = max_rows
        self._fast, self._compile = fast, compile
        self._verified = False
        self.trials: dict[bool, float] = {}
        """How far FP8 layers of trials with few and with many rows were from the reference (``Fp8Step.off_reference``)."""
        self._address: tuple[int, ...] = ()
        self._state = self._make_state(first_pages(max_context, policy.device))
        self._reset()

    @property
    def latest_B(self) -> Tensor:
        """The last token of every row, on the device."""
        return self._state.tokens_B

    @property
    def routes_BLK(self) -> Tensor | None:
        """The experts of the tokens that the latest step fed, until the next; None where they are not recorded."""
        return self._state.routes_BLK

    def lay_out(self, rows: Sequence[RowLayout], latest_N: Tensor) -> None:
        """Make these rows the batch; their last tokens are taken from ``latest_N``."""
        pages = max(len(row.pages) for row in rows)
        if pages > self._state.pages:
            self._state = self._make_state(1 << (pages - 1).bit_length())
            self._drop_graphs()
        if self._address != self._pool.address:
            self._drop_graphs()
        self._bucket = bucket_of(len(rows))
        self._truncated = any(row.sampling.top_p < 1 or row.sampling.top_k > 0 for row in rows)
        self._again = read_again(rows) * self._pool.block[:1, :, :1, :, :1].nbytes
        self._state.lay_out(rows, self._bucket, latest_N)
        if self._pool.states:
            laid = self._state.view(self._bucket)
            laid.freeze_ended(laid.tokens_B, self._stop_S)
        if not self._verified or not self._tried(self._bucket):
            self._verify(len(rows), pages)

    def step(self) -> Tensor:
        """One step of the batch: tokens, log-probs and sampled log-probs as [3, rows], until the next step."""
        graph = self._graph() if self._capture else None
        if graph is None:
            self._run(self._bucket)
        else:
            graph.replay()
        return self._state.packed_3B

    def refresh(self) -> None:
        """Call this when weights changed. In-place changes are fine; parameters at new addresses need new graphs."""
        self._policy.settle()
        if self._parameters != _addresses(self._policy):
            self._reset()
        else:
            with torch.no_grad():
                self._ops.renew()
                if isinstance(self._step, Fp8Step):
                    self._step.renew()

    def _drop_graphs(self) -> None:
        """Drop graphs captured for addresses that no longer exist, with their memory pool; new graphs get a new pool."""
        self._graphs: dict[tuple[int, bool, bool], Any] = {}
        self._address = self._pool.address
        self._memory: Any = torch.cuda.graph_pool_handle() if self._policy.device.type == "cuda" else None

    def _reset(self) -> None:
        self._drop_graphs()
        self._policy.settle()
        self._parameters = _addresses(self._policy)
        self._capture = self._fast and self._policy.device.type == "cuda"
        matched = self._policy.matched is not None
        self._ops = self._fast_ops() if self._fast and not matched else TorchOps()
        mixed = any(has_mixer(layer) for layer in self._policy.adapter.language_model.layers)
        self._step: FusedStep | StockStep | MatchedStep | Fp8Step = StockStep(self._policy, self._ops)
        self._verified = not self._fast
        self.trials.clear()
        if self._fp8:
            self._step = self._fp8_step()
        elif matched:
            self._step = MatchedStep(self._policy)
        elif self._fast:
            try:
                self._step = FusedStep(self._policy, self._ops)
            except UnknownLayer as error:
                if not mixed:
                    self._note(f"decoding runs through the stock layers: {error}, which the fused step does not know.")
                elif self._policy.device.type == "cuda":
                    self._step = LayerStep(self._policy, self._ops)

    def _fp8_step(self) -> Fp8Step:
        refuse_without_fp8(self._policy.device)
        if self._policy.matched is not None or self._policy.dtype != torch.bfloat16:
            matched = self._policy.matched is not None
            wrong = "model.precision is 'matched'" if matched else f"weights are {self._policy.dtype}"
            raise EngineError(f"rollout.quantization is 'fp8', which is of bfloat16 weights, and {wrong}. {OFF}.")
        return Fp8Step(self._policy, self._ops, KernelProducts() if self._fast else TorchProducts())

    def _fast_ops(self) -> TorchOps:
        if self._policy.device.type == "cuda" and find_spec("triton") is not None:
            from sensorium.engines.native.decode_kernels import TritonOps

            return TritonOps(self._note if self._compile else None)
        return TorchOps()

    def _make_state(self, pages: int) -> DecodeState:
        rows = bucket_of(self._max_rows)
        routes = None if self._recorder is None else self._recorder.buffer(rows)
        return DecodeState(rows, pages, self._policy.vocab_size, self._policy.device, routes)

    def _tried(self, bucket: int) -> bool:
        """Whether a trial has seen the kernels of this bucket: in FP8 few and many rows have others."""
        return not isinstance(self._step, Fp8Step) or not self._fast or (bucket <= FEW_ROWS) in self.trials

    def _verify(self, count: int, pages: int) -> None:
        """Hold the fast step against the reference on the batch as it is; what both write to the cache is overwritten.

        States of delta nets, which both would advance, are put back. Experts are the reference's: where two are nearly as
        likely, a rounding would change all that follows. Rows without numbers fail by themselves and tell nothing; where
        there are no others, the next batch is taken.
        """
        rows = self._state.view(self._bucket)
        used = replace(rows, table_BP=rows.table_BP[:, :pages])  # plain torch reads the whole table
        if isinstance(self._step, Fp8Step):
            self._verify_fp8(self._step, rows, used, count)
            return
        wider = self._policy.matched is not None or self._pool.states
        bound = BOUNDS[self._policy.dtype] * (WIDER if wider else 1)
        states, slots_B = self._pool.states, rows.slots_B
        states.settle(slots_B)
        held = [tensor.index_select(0, slots_B) for tensor in states.tensors]

        def put_back() -> None:
            states.settle(slots_B)  # nothing waits afterwards
            for tensor, before in zip(states.tensors, held, strict=True):
                tensor.index_copy_(0, slots_B, before)

        with self._policy.watch_routers() as seen:
            expected_BV = StockStep(self._policy, TorchOps()).logits(used, self._pool)[:count].float()
        routes_BLK = torch.stack([one.ids_TK for one in seen], 1) if seen else None
        put_back()
        sound_B = expected_BV.isfinite().all(1)
        if states:
            sound_B &= slots_B[:count] > 0  # rows that ended share the scratch slot
        if not sound_B.any():
            return
        self._verified = True
        _, _, self._ops.apart = self._key(self._bucket)
        try:
            with self._policy.replay_routes(routes_BLK):
                found_BV = self._step.logits(rows, self._pool)[:count].float()
            error = float((found_BV - expected_BV)[sound_B].abs().max() / expected_BV[sound_B].abs().max())
            wrong = "" if error <= bound else f"give logits {error:.2g} off the reference (bound {bound:g} of the largest)"
        except Exception as failure:  # a kernel that this GPU or Triton cannot build is a reason to be slow, not to stop
            wrong = f"cannot run here ({type(failure).__name__}: {_first_line(failure)})"
        put_back()
        if wrong and self._policy.matched is not None:
            raise EngineError(
                f"model.precision is 'matched', but its layers {wrong}. Use model.precision: fast, and report this."
            )
        if wrong:
            self._note(
                f"the {self._step.name} ({self._ops.name}) {wrong}; decoding goes on with the stock layers in plain torch, "
                "which is slower."
            )
            self._ops = TorchOps()
            self._step = StockStep(self._policy, self._ops)

    def _verify_fp8(self, step: Fp8Step, rows: DecodeRows, used: DecodeRows, count: int) -> None:
        """Hold the layers of the FP8 step against the reference; nothing slower takes over where they are wrong."""
        _, _, self._ops.apart = self._key(self._bucket)
        try:
            error = step.off_reference(rows, used, self._pool, count)
        except Exception as failure:
            wrong = f"cannot run here ({type(failure).__name__}: {_first_line(failure)})"
            raise EngineError(
                f"rollout.quantization is 'fp8', but its layers {wrong}. {OFF}, and report this."
            ) from failure
        if error is None:
            return
        self._verified = True
        self.trials[self._bucket <= FEW_ROWS] = error
        if not error <= FP8_BOUND:
            raise EngineError(
                f"rollout.quantization is 'fp8', but one of its layers adds what is {error:.2g} off the reference (bound "
                f"{FP8_BOUND:g}). {OFF}, and report this."
            )

    def _run(self, bucket: int) -> None:
        rows = self._state.view(bucket)
        _, _, self._ops.apart = self._key(bucket)
        routes_BLK = self._state.routes_BLK
        with recording_routes(self._policy, None if routes_BLK is None else routes_BLK[:bucket]):
            logits_BV = self._step.logits(rows, self._pool)
        before_B = rows.tokens_B.clone() if self._pool.states else rows.tokens_B
        self._ops.draw(logits_BV, rows, self._forbidden_F, self._stop_S, self._truncated)
        if self._pool.states:
            rows.freeze_ended(before_B, self._stop_S)

    def _graph(self) -> Any:
        """The graph of the batch's bucket, captured on first use; None where that fails."""
        key = self._key(self._bucket)
        if key not in self._graphs:
            captured = {known[0] for known in self._graphs if known == self._key(known[0])}
            try:
                for bucket in buckets_to_capture(self._bucket, captured):
                    self._graphs[self._key(bucket)] = self._captured(bucket)
                    self.captured += 1
            except (RuntimeError, NoDeviceCode) as error:
                self._capture = False
                self._note(f"the decode step cannot be captured in a CUDA graph, so it runs slower: {_first_line(error)}")
                return None
        return self._graphs.get(key)  # none where a trial on the way failed: its next step is of another kind

    def _key(self, bucket: int) -> tuple[int, bool, bool]:
        """What graphs differ in: the bucket, whether anything is truncated, whether rows read apart what they share."""
        return bucket, self._truncated, self._ops.reads_apart(bucket, self._again)

    def _captured(self, bucket: int) -> Any:
        """Capture the step of a bucket as a CUDA graph. The warm-up runs it on padding rows; then the state is restored."""
        state = self._state
        moved = (state.tokens_B, state.integers_CB, state.packed_3B, state.table_BP)
        before = [tensor.clone() for tensor in moved]
        here, side = torch.cuda.current_stream(), _side_stream(torch.cuda.current_device())
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING, compiling():
            side.wait_stream(here)
            self._ops.branching = True
            try:
                with torch.cuda.stream(side):
                    for tensor in moved:
                        tensor.zero_()
                    self._run(bucket)
                    for tensor, value in zip(moved, before, strict=True):
                        tensor.copy_(value)
                    side.synchronize()
                    graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
                    try:
                        self._run(bucket)
                    except BaseException:
                        _end_quietly(graph)
                        raise
                    graph.capture_end()
            finally:
                self._ops.branching = False
                here.wait_stream(side)
        return graph

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if self.noted is None:
            fall_back(text)
        else:
            note_fallback(text)
            self.noted(text)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The stream on which steps are captured, one at a time.

    One for all, since torch has 32 streams and hands them out in turn: a new one may be that of a thread at work, whose
    operations would break the capture.
    """
    return torch.cuda.Stream(device)


def _addresses(policy: Policy) -> list[int]:
    return [parameter.data_ptr() for parameter in policy.model.parameters()]


def _end_quietly(graph: Any) -> None:
    """End a capture that failed; the failure was already reported."""
    with suppress(RuntimeError):
        graph.capture_end()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
