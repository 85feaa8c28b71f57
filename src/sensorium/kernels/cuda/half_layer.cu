// Half a decode layer in one launch, for few rows: what follows attention, up to the next layer's projections.
//
//     out · add, norm · gate and up · down · add, norm · queries, keys and values of the next layer
//
// Reading weights is what takes the time, so they are read in 12 bits each, and without a pause: weights wait for nobody.
// Every warp streams its own weights, of all products one after the other, through a ring in shared memory, and goes on
// doing so while the grid waits until an activation is there. A lane reads back only what it copied itself, so the ring needs
// no synchronisation.
//
// A tile is 16 outputs × 64 of the inner size (mma m16n8k16, the inner index permuted alike on both sides, so that a lane
// takes consecutive bytes). In 12 bits: sign, 7 bits of mantissa, and 4 of the exponent, counted from the largest of the 16
// outputs. All weights from 2^-14 of the largest on are exact; smaller ones are off by at most 2^-22 of it: less than a
// rounding of the sum that the largest enters, and next to nothing in the sum of another output, unless all weights of that
// one are thousands of times smaller than its neighbours'. Narrow products are cut along the inner size among CTAs, and what takes them
// sums the parts in order. A tile of gate and up holds eight outputs of each. Sums are in a fixed order: equal inputs give
// equal bits.
//
// Given by the compiler's command line: ROW_TILES (of eight), CTAS (one on each multiprocessor), SHARED_BYTES of each, SEEN,
// WIDTH, INNER, PROJECTED; FINE, for gate, up and down in float16, as layer_parts.py says of a model's first layers; LAST, where
// no projections follow. ``half_layers.py`` fills the structures and checks the sizes.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define INLINE __device__ __forceinline__

constexpr int TILE = 1536;                    // bytes: signs and mantissas of 32 of the inner size, of the others, exponents
constexpr int WARPS = 12, THREADS = 32 * WARPS;
constexpr int MOST_PARTS = 12;
constexpr int NORM_BYTES = 1024;              // of shared memory, for what warps sum together
constexpr int X_BYTES = 63488;                // of shared memory, for activations: 32 rows of what a CTA takes of a narrow product
constexpr int DEPTH = (SHARED_BYTES - NORM_BYTES - X_BYTES) / (TILE * WARPS);    // tiles of a warp's ring
constexpr int COUNTER = 16;                   // places from one counter to the next: a line of the cache
static_assert(DEPTH >= 2, "too little shared memory");

struct packed {
    const char *tiles;                        // [outputs / 16, inner / 64, TILE]
    const u32 *scales;                        // [outputs / 16] a power of two, twice, as bfloat16
};

struct half_layer {
    packed out, gated, down, projection;      // [WIDTH, SEEN], [2 INNER, WIDTH], [WIDTH, INNER], [PROJECTED, WIDTH]
    const u16 *seen;                          // [rows, SEEN] what attention gave
    const u16 *between_gain, *next_gain;      // [WIDTH]
    const float *residual;                    // [rows, WIDTH]
    float *sum;                               // [rows, WIDTH] the residual stream after the layer
    float *parts;                             // [MOST_PARTS, rows, WIDTH]
    u16 *normed;                              // [rows, WIDTH]
    u16 *inner;                               // [rows, INNER]
    float *projected;                         // [Projection::PARTS, rows, PROJECTED], unless LAST: then normed is the result
    u64 *arrived;                             // [5, COUNTER] zero before the first launch; launches that share it have equal rows
    float between_eps, next_eps;
    int rows;                                 // at most 8 ROW_TILES, and CTAS
};

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__device__ constexpr int cut(int a, int b) { return (a + b - 1) / b; }

// A product whose inner size is cut among CTAs: ABREAST tiles to each, and its blocks of 64 among ALONG warps for each tile.
template <int OUTPUTS, int INNER_SIZE, int ABREAST_>
struct Narrow {
    static constexpr int ABREAST = ABREAST_, ALONG = WARPS / ABREAST;
    static constexpr int WIDE = OUTPUTS, SIZE = INNER_SIZE, TILES = OUTPUTS / 16, BLOCKS = INNER_SIZE / 64;
    static constexpr int GROUPS = cut(TILES, ABREAST), PARTS = least(least(CTAS / GROUPS, MOST_PARTS), BLOCKS);
    static constexpr int MOST_BLOCKS = cut(BLOCKS, PARTS);
    static_assert(GROUPS <= CTAS, "too few multiprocessors");
    static INLINE int part() { return blockIdx.x / GROUPS; }
    static INLINE int tile() { return blockIdx.x % GROUPS * ABREAST + threadIdx.x / 32 % ABREAST; }
    static INLINE int along() { return threadIdx.x / 32 / ABREAST; }
    static INLINE int first() { return part() * BLOCKS / PARTS; }
    static INLINE int blocks() { return part() < PARTS ? (part() + 1) * BLOCKS / PARTS - first() : 0; }
    static INLINE bool busy() { return tile() < TILES; }
};

// Gate and up: every CTA takes all of the inner size, its tiles in rounds of one to a warp.
struct Gated {
    static constexpr int ALONG = 1, TILES = INNER / 8, BLOCKS = WIDTH / 64, ROUNDS = cut(cut(TILES, CTAS), WARPS);
    static INLINE int begin(int cta) { return (int)((long long)cta * TILES / CTAS); }
    static INLINE int tile(int round) { return begin(blockIdx.x) + round * WARPS + threadIdx.x / 32; }
    static INLINE int along() { return 0; }
    static INLINE bool busy(int round) { return tile(round) < begin(blockIdx.x + 1); }
};

typedef Narrow<WIDTH, SEEN, 4> Out;
typedef Narrow<WIDTH, INNER, WARPS> Down;     // a CTA takes little of the inner size, so that its activations come at once
typedef Narrow<PROJECTED, WIDTH, 4> Projection;
constexpr int PHASES = (LAST ? 2 : 3) + Gated::ROUNDS;
constexpr float FINE_SCALE = 64.0f, LARGEST_HALF = 65504.0f;         // inner values in float16 are divided by the first

INLINE u16 rounded(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

INLINE u16 half(float x) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

INLINE float widened(u16 x) { return __uint_as_float((u32)x << 16); }

template <bool HALF>
INLINE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (HALF)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- weights ----

// Eight pairs of weights, of a lane's two rows × 8. A pair of bytes holds, from the top: sign of the second, mantissa of the
// first, sign of the first, mantissa of the second. Exponents are counted from 0, where bfloat16 has its tiniest numbers, so
// that the scale makes them right, those without a leading one too. In float16 they are 2^112 times that, for a scale of sums.
template <bool HALF>
INLINE void unpack(u32 (&pairs)[8], const uint4 &given, u32 low_exponents, u32 high_exponents, u32 scale) {
    const u32 words[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 own = i % 2 ? words[i / 2] : __byte_perm(words[i / 2], 0, 0x2301);
        const u32 all = i < 4 ? low_exponents : high_exponents;
        const u32 moved = i % 4 == 0 ? all << 7 : i % 4 == 1 ? all << 3 : i % 4 == 2 ? all >> 1 : all >> 5;
        const u32 small = (own & 0x807f807f) | (moved & 0x07800780);
        if (HALF) pairs[i] = (small & 0x80008000) | (small & 0x07ff07ff) << 3;
        else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(small), "r"(scale));
    }
}

// Where a warp's weights of one phase lie, for this lane.
struct Reach {
    const char *at;
    int tiles, step;
};

template <class Product>
INLINE Reach reach_of(const packed &weight, int tile, int first, int blocks, bool busy) {
    Reach r;
    const int mine = busy && Product::along() < Product::ALONG ? cut(blocks - Product::along(), Product::ALONG) : 0;
    r.tiles = mine > 0 ? mine : 0;
    r.step = TILE * Product::ALONG;
    r.at = weight.tiles + ((long long)tile * Product::BLOCKS + first + Product::along()) * TILE + threadIdx.x % 32 * 16;
    return r;
}

template <class Product>
INLINE Reach narrow_reach(const packed &weight) {
    return reach_of<Product>(weight, Product::tile(), Product::first(), Product::blocks(), Product::busy());
}

__device__ __noinline__ Reach reach(const half_layer *given, int phase) {
    if (phase == 0) return narrow_reach<Out>(given->out);
    if (phase <= Gated::ROUNDS)
        return reach_of<Gated>(given->gated, Gated::tile(phase - 1), 0, Gated::BLOCKS, Gated::busy(phase - 1));
    if (phase == Gated::ROUNDS + 1) return narrow_reach<Down>(given->down);
    return narrow_reach<Projection>(given->projection);
}

class Weights {
public:
    INLINE Weights(const half_layer &given, char *ring) : given(given), ring(ring), slot(0), phase(-1) {
        next.tiles = 0;
        for (int i = 0; i < DEPTH; ++i) fetch();
    }

    // The oldest tile of the ring, 16 bytes of each lane, and one more asked for in its place.
    INLINE void take(uint4 (&found)[3]) {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
#pragma unroll
        for (int i = 0; i < 3; ++i) found[i] = *(const uint4 *)(ring + slot + i * 512);
        fetch();
    }

private:
    const half_layer &given;
    char *ring;
    int slot, phase;
    Reach next;

    INLINE void fetch() {
        while (next.tiles == 0 && phase < PHASES - 1) next = reach(&given, ++phase);
        if (next.tiles > 0) {
            const u32 to = (u32)__cvta_generic_to_shared(ring + slot);
#pragma unroll
            for (int i = 0; i < 3; ++i)
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + i * 512), "l"(next.at + i * 512)
                             : "memory");
            next.at += next.step, --next.tiles;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        slot = slot + TILE == DEPTH * TILE ? 0 : slot + TILE;
    }
};

// ---- products ----

typedef float Sums[ROW_TILES][4];

// Multiplies a warp's blocks of 64 of a CTA's share of the inner size, which has MOST of them at the most. Activations come in
// one chunk or in several, the next one read while one is used.
template <class Product, int MOST, bool HALF>
INLINE void products(
    Sums &sums, Weights &weights, char *region, u32 scale, bool busy, const u16 *x, int inner, int first, int blocks, int rows
) {
    constexpr int ROOM = (X_BYTES / (8 * ROW_TILES) - 64) / 128, ROOM_OF_TWO = (X_BYTES / (16 * ROW_TILES) - 64) / 128;
    constexpr bool ONE = MOST <= ROOM;
    constexpr int CHUNK = ONE ? MOST : ROOM_OF_TWO;                  // blocks
    constexpr int X_ROW = 128 * CHUNK + 64;                          // bytes; 64 more keep two rows in different banks
    constexpr int VECTORS = cut(8 * ROW_TILES * CHUNK * 8, THREADS);
    static_assert(CHUNK >= 1, "too many rows");
    const int lane = threadIdx.x % 32;
    uint4 held[VECTORS];
    auto load = [&](int chunk) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int at = threadIdx.x + i * THREADS, row = at / (CHUNK * 8), k = at % (CHUNK * 8) * 8;
            held[i] = make_uint4(0, 0, 0, 0);
            if (row < rows && chunk * CHUNK * 64 + k < blocks * 64)
                held[i] = __ldcg((const uint4 *)(x + (long long)row * inner + (first + chunk * CHUNK) * 64 + k));
        }
    };
    load(0);
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
    const int chunks = cut(blocks, CHUNK);
    int block = Product::along();
    for (int chunk = 0; chunk < chunks; ++chunk) {
        char *buffer = region + (ONE ? 0 : chunk % 2 * (X_BYTES / 2));
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int at = threadIdx.x + i * THREADS, row = at / (CHUNK * 8), k = at % (CHUNK * 8) * 8;
            if (row < 8 * ROW_TILES) *(uint4 *)(buffer + row * X_ROW + 2 * k) = held[i];
        }
        __syncthreads();
        if (!ONE && chunk + 1 < chunks) load(chunk + 1);
        const int end = busy ? least(blocks, (chunk + 1) * CHUNK) : 0;
        const char *base = buffer + lane / 4 * X_ROW + lane % 4 * 16 - chunk * CHUNK * 128;
        for (; block < end; block += Product::ALONG) {
            uint4 tile[3];
            weights.take(tile);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 w[8];
                unpack<HALF>(w, tile[half], half ? tile[2].z : tile[2].x, half ? tile[2].w : tile[2].y, scale);
#pragma unroll
                for (int i = 0; i < ROW_TILES; ++i) {
                    const uint4 b = *(const uint4 *)(base + i * 8 * X_ROW + block * 128 + half * 64);
                    multiply<HALF>(sums[i], w[0], w[4], w[1], w[5], b.x, b.y);
                    multiply<HALF>(sums[i], w[2], w[6], w[3], w[7], b.z, b.w);
                }
            }
        }
    }
    if (HALF) {
        const float factor = widened((u16)scale) * 0x1p-112f;
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] *= factor;
    }
}

template <class Product, bool HALF>
INLINE void narrow_product(Weights &weights, char *region, const packed &weight, const u16 *x, float *parts, int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, along = Product::along(), tile = Product::tile();
    if (!Product::blocks()) return;
    Sums sums;
    products<Product, Product::MOST_BLOCKS, HALF>(
        sums, weights, region, Product::busy() ? weight.scales[tile] : 0, Product::busy() && along < Product::ALONG, x,
        Product::SIZE, Product::first(), Product::blocks(), rows
    );
    if (Product::ALONG > 1) {
        float4 *others = (float4 *)region;
        __syncthreads();
        if (along && along < Product::ALONG)
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i)
                others[((warp - Product::ABREAST) * ROW_TILES + i) * 32 + lane] =
                    make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        __syncthreads();
        if (!along)
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
                for (int j = 0; j + 1 < Product::ALONG; ++j) {
                    const float4 more = others[((j * Product::ABREAST + warp) * ROW_TILES + i) * 32 + lane];
                    sums[i][0] += more.x, sums[i][1] += more.y, sums[i][2] += more.z, sums[i][3] += more.w;
                }
    }
    if (along || !Product::busy()) return;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = i * 8 + lane % 4 * 2 + j % 2, output = tile * 16 + lane / 4 + j / 2 * 8;
            if (row < rows) __stcg(parts + ((long long)Product::part() * rows + row) * Product::WIDE + output, sums[i][j]);
        }
}

INLINE u16 stored(float inner) {
    if (!FINE) return rounded(inner);
    inner /= FINE_SCALE;
    return half(fabsf(inner) > LARGEST_HALF ? copysignf(LARGEST_HALF, inner) : inner);
}

INLINE void gated_product(Weights &weights, char *region, const half_layer &given) {
    const int lane = threadIdx.x % 32;
    for (int round = 0; round < Gated::ROUNDS; ++round) {
        const int tile = Gated::tile(round);
        const bool busy = Gated::busy(round);
        Sums sums;
        if (round) __syncthreads();
        products<Gated, Gated::BLOCKS, FINE>(
            sums, weights, region, busy ? given.gated.scales[tile] : 0, busy, given.normed, WIDTH, 0, Gated::BLOCKS, given.rows
        );
        if (!busy) continue;
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = i * 8 + lane % 4 * 2 + j;
                const float opened = FINE ? sums[i][j] : widened(rounded(sums[i][j]));
                const float value = FINE ? sums[i][2 + j] : widened(rounded(sums[i][2 + j]));
                if (row < given.rows)
                    __stcg((short *)given.inner + (long long)row * INNER + tile * 8 + lane / 4,
                           (short)stored(opened / (1.0f + __expf(-opened)) * value));
            }
    }
}

// ---- norms ----

constexpr int VECTORS_OF_A_ROW = cut(WIDTH / 4, THREADS);
typedef float4 Row[VECTORS_OF_A_ROW];         // what a thread has of a row of WIDTH

// One CTA a row: the parts added to the residual stream, which stays in registers, and the norm of the sum.
template <int PARTS, bool HALF>
INLINE void add_norm(
    Row &kept, const float *parts, float factor, const u16 *gain, float eps, u16 *normed, float *sums, int rows
) {
    const int row = blockIdx.x;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS_OF_A_ROW; ++i) {
        const int at = threadIdx.x + i * THREADS;
        if (at >= WIDTH / 4) continue;
        float4 found[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; ++p) found[p] = __ldcg((const float4 *)(parts + ((long long)p * rows + row) * WIDTH) + at);
        float4 value = found[0];
#pragma unroll
        for (int p = 1; p < PARTS; ++p)
            value.x += found[p].x, value.y += found[p].y, value.z += found[p].z, value.w += found[p].w;
        float4 &k = kept[i];
        k.x += value.x * factor, k.y += value.y * factor, k.z += value.z * factor, k.w += value.w * factor;
        squares += k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w;
    }
#pragma unroll
    for (int offset = 16; offset; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) squares += sums[i];
    const float scale = 1.0f / sqrtf(squares / WIDTH + eps);
#pragma unroll
    for (int i = 0; i < VECTORS_OF_A_ROW; ++i) {
        const int at = threadIdx.x + i * THREADS;
        if (at >= WIDTH / 4) continue;
        const ushort4 g = ((const ushort4 *)gain)[at];
        const float4 k = kept[i];
        ushort4 n;
        const float x = widened(g.x) * (k.x * scale), y = widened(g.y) * (k.y * scale);
        const float z = widened(g.z) * (k.z * scale), w = widened(g.w) * (k.w * scale);
        n.x = HALF ? half(x) : rounded(x), n.y = HALF ? half(y) : rounded(y);
        n.z = HALF ? half(z) : rounded(z), n.w = HALF ? half(w) : rounded(w);
        __stcg((ushort4 *)(normed + (long long)row * WIDTH) + at, n);
    }
    __syncthreads();
}

// ---- the grid ----

INLINE u64 arrive(u64 *counter) {
    u64 before;
    asm volatile("atom.add.release.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
    return before;
}

INLINE void wait_for(const u64 *counter, u64 target) {
    u64 found;
    for (u32 tries = 0;; ++tries) {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(counter) : "memory");
        if (found >= target) return;
        if (tries >> 27) __trap();                                   // after minutes an error, not a hang
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) half_layer_kernel(const __grid_constant__ half_layer given) {
    extern __shared__ char memory[];
    float *sums = (float *)memory;
    char *region = memory + NORM_BYTES;
    Weights weights(given, region + X_BYTES + threadIdx.x / 32 * DEPTH * TILE + threadIdx.x % 32 * 16);
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const bool first = threadIdx.x == 0, owner = blockIdx.x < given.rows;
    const u64 rows = given.rows;
    Row kept;
    if (owner)
#pragma unroll
        for (int i = 0; i < VECTORS_OF_A_ROW; ++i)
            if (threadIdx.x + i * THREADS < WIDTH / 4)
                kept[i] = ((const float4 *)(given.residual + (long long)blockIdx.x * WIDTH))[threadIdx.x + i * THREADS];

    u64 launch = 0;
    narrow_product<Out, false>(weights, region, given.out, given.seen, given.parts, given.rows);
    __syncthreads();
    if (first) launch = arrive(given.arrived) / CTAS + 1;            // how many launches there were, this one included
    if (owner) {
        if (first) wait_for(given.arrived, launch * CTAS);
        __syncthreads();
        add_norm<Out::PARTS, FINE>(
            kept, given.parts, 1.0f, given.between_gain, given.between_eps, given.normed, sums, given.rows
        );
        if (first) arrive(given.arrived + COUNTER);
    }
    if (first) wait_for(given.arrived + COUNTER, launch * rows);
    __syncthreads();
    gated_product(weights, region, given);
    __syncthreads();
    if (first) {
        arrive(given.arrived + 2 * COUNTER);
        wait_for(given.arrived + 2 * COUNTER, launch * CTAS);
    }
    __syncthreads();
    narrow_product<Down, FINE>(weights, region, given.down, given.inner, given.parts, given.rows);
    __syncthreads();
    if (first) arrive(given.arrived + 3 * COUNTER);
    if (owner) {
        if (first) wait_for(given.arrived + 3 * COUNTER, launch * CTAS);
        __syncthreads();
        add_norm<Down::PARTS, false>(
            kept, given.parts, FINE ? FINE_SCALE : 1.0f, given.next_gain, given.next_eps, given.normed, sums, given.rows
        );
        if (first) arrive(given.arrived + 4 * COUNTER);
#pragma unroll
        for (int i = 0; i < VECTORS_OF_A_ROW; ++i)
            if (threadIdx.x + i * THREADS < WIDTH / 4)
                ((float4 *)(given.sum + (long long)blockIdx.x * WIDTH))[threadIdx.x + i * THREADS] = kept[i];
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (!LAST) {
        if (first) wait_for(given.arrived + 4 * COUNTER, launch * rows);
        __syncthreads();
        narrow_product<Projection, false>(weights, region, given.projection, given.normed, given.projected, given.rows);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- packing ----

// One CTA for a tile's 16 outputs: eight rows of ``low`` and eight of ``high``, those of the next tile ``stride`` elements on.
struct packing {
    const u16 *low, *high;
    char *tiles;
    u32 *scales;
    long long stride;
    int inner;
};

INLINE u32 encoded(u32 bits, int lowest) {                           // sign at bit 11, exponent and mantissa below
    const int exponent = bits >> 7 & 0xff, code = exponent - lowest;
    const u32 sign = bits >> 15 << 11, mantissa = bits & 0x7f;
    if (code >= 1) return sign | code << 7 | mantissa;
    const u32 whole = exponent ? 128 | mantissa : mantissa;
    const int shift = lowest + 1 - (exponent ? exponent : 1);
    return sign | (shift > 8 ? 0 : (whole + (1 << shift >> 1)) >> shift);
}

extern "C" __global__ void pack_kernel(const __grid_constant__ packing given) {
    __shared__ int largest;
    const u16 *rows[2] = {given.low + blockIdx.x * given.stride, given.high + blockIdx.x * given.stride};
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    int most = 0;
    for (int half = 0; half < 2; ++half)
        for (int at = threadIdx.x * 8; at < 8 * given.inner; at += blockDim.x * 8) {
            const uint4 v = *(const uint4 *)(rows[half] + at);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
            for (int i = 0; i < 4; ++i) most = max(most, max((int)(words[i] >> 7 & 0xff), (int)(words[i] >> 23 & 0xff)));
        }
    atomicMax(&largest, most);
    __syncthreads();
    const int lowest = min(max(largest - 15, 0), 127);
    // Weights that are infinite, no numbers, or from 2^16 on cannot be told in 12 bits; their 16 outputs are no numbers then.
    const u32 scale = largest > lowest + 15 ? 0x7fc0 : (u32)(lowest + 127) << 7;
    if (threadIdx.x == 0) given.scales[blockIdx.x] = scale | scale << 16;
    const int lane = threadIdx.x % 32, blocks = given.inner / 64;
    for (int block = threadIdx.x / 32; block < blocks; block += blockDim.x / 32) {
        char *tile = given.tiles + ((long long)blockIdx.x * blocks + block) * TILE + lane * 16;
        u32 exponents[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long begin = (long long)(lane / 4) * given.inner + block * 64 + half * 32 + lane % 4 * 8;
            u32 codes[16], words[4];                                 // the lane's weights: eight of each of its two rows
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const uint4 v = *(const uint4 *)(rows[side] + begin);
                const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) codes[8 * side + i] = encoded(pairs[i / 2] >> 16 * (i % 2) & 0xffff, lowest);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 word = 0;
#pragma unroll
                for (int side = 0; side < 2; ++side) {               // the first or second of each pair
                    const u32 one = codes[4 * i + side], other = codes[4 * i + 2 + side];
                    word |= (other >> 11 << 15 | (one & 0x7f) << 8 | one >> 11 << 7 | (other & 0x7f)) << 16 * side;
                }
                words[i] = word;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 word = 0;
#pragma unroll
                for (int j = 0; j < 8; ++j) word |= (codes[8 * i + j] >> 7 & 15) << (j / 2 * 4 + j % 2 * 16);
                exponents[2 * half + i] = word;
            }
            *(uint4 *)(tile + half * 512) = make_uint4(words[0], words[1], words[2], words[3]);
        }
        *(uint4 *)(tile + 1024) = make_uint4(exponents[0], exponents[1], exponents[2], exponents[3]);
    }
}
