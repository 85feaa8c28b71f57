// Decode attention in one launch: queries, keys and values are taken from the parts of their product, normed and rotated; the
// new entry goes to its page; each row attends to its pages.
//
// A cluster of SPLITS CTAs has one row and key head, and its warps share the row's entries among them, 16 at a time. They copy
// them to shared memory ahead of their use, the first before the kernel before this one has ended. Pages that rows share are
// read by each of them, mostly from the L2 cache. What the warps found is merged over distributed shared memory. Sums are in a
// fixed order: equal inputs give equal bits.
//
// Scores are keys · queries (mma m16n8k16: 16 entries × up to 8 heads that share a key head), in float32; weights to 11 bits
// and values in float16, as in decode_attention_triton.py, whose results these are but for the order of sums.
//
// Given by the compiler's command line: HEADS, KV, SIZE of a head, PAGE, SPLITS, BIAS and NORM (0 or 1). ``decode_kernels.py``
// fills the structure and checks the sizes.

typedef unsigned int u32;
typedef unsigned short u16;

#define INLINE __device__ __forceinline__

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int SHARE = HEADS / KV, WIDE = (HEADS + 2 * KV) * SIZE;
constexpr int STEPS = SIZE / 16, OF_A_LANE = SIZE / 32;
constexpr int ENTRIES = 16, ENTRY_BYTES = 2 * SIZE, TILE = 2 * ENTRIES * ENTRY_BYTES;     // keys, then values
constexpr int DEPTH = 3;                                             // tiles of a warp's ring
constexpr int QUERY_BYTES = ENTRY_BYTES + 16;                        // from a query to the next: in different banks
constexpr int FOUND = SIZE + 4;                                      // floats from a query's sum to the next one's
constexpr int ALL_WARPS = WARPS * SPLITS, HEADS_OF_A_CTA = (8 + SPLITS - 1) / SPLITS;    // of a cluster, and that it merges
constexpr float NOTHING = -1e30f;                                    // a score that no entry has
static_assert(SHARE <= 8 && SIZE % 64 == 0 && PAGE % ENTRIES == 0 && ALL_WARPS <= 32, "sizes that the kernel does not know");
static_assert(8 * FOUND * 4 <= DEPTH * TILE, "no room for sums");

struct attention {
    const float *parts;                       // [count, rows, WIDE] queries, keys and values side by side
    const u16 *query_bias, *key_bias, *value_bias;
    const u16 *cos, *sin;                     // [rows, SIZE]
    const u16 *query_gain, *key_gain;         // [SIZE]
    u16 *keys, *values;                       // [pages, KV, PAGE, SIZE]
    const int *table;                         // [rows, width]
    const long long *lengths;                 // [rows] entries before the new one
    u16 *out;                                 // [rows, HEADS, SIZE]
    float eps, factor;
    int count, rows, width;
};

struct Sums {
    float values[STEPS][4];                   // of 16 of a head's size × 8 heads, as mma has them
    float weight[2], largest[2];              // of the lane's two heads; the weight of its own entries only
};

INLINE u16 rounded(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

INLINE float widened(u16 x) { return __uint_as_float((u32)x << 16); }
INLINE float through(float x) { return widened(rounded(x)); }

INLINE u32 halves(float first, float second) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}

INLINE u32 to_halves(u32 pair) { return halves(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)); }

INLINE float power(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

INLINE u32 address(const void *shared_memory) { return (u32)__cvta_generic_to_shared(shared_memory); }

// ---- clusters ----

INLINE u32 rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

// Where another CTA's shared memory begins. Asked for after a meeting, so that nothing is read before it.
INLINE u32 memory_of(const char *memory, u32 cta) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address(memory)), "r"(cta) : "memory");
    return r;
}

INLINE float read(u32 there) {
    float r;
    asm("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(there));
    return r;
}

INLINE void meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- queries, and the new entry ----

struct Angles {
    float cos[OF_A_LANE], sin[OF_A_LANE];
    INLINE Angles(const attention &given, long long row) {
#pragma unroll
        for (int i = 0; i < OF_A_LANE; ++i) {
            const long long at = row * SIZE + threadIdx.x % 32 + 32 * i;
            cos[i] = widened(given.cos[at]), sin[i] = widened(given.sin[at]);
        }
    }
};

// Up to four heads of the product, each as a lane has it (every 32nd): their parts summed, normed and rotated.
struct Heads {
    float x[4][OF_A_LANE];
    int begin[4];
    const u16 *bias[4];

    INLINE void is_query(int v, const attention &given, int k, int head) {
        begin[v] = (k * SHARE + (head < SHARE ? head : 0)) * SIZE;   // where there is none any will do
        bias[v] = given.query_bias + begin[v];
    }

    INLINE void load(const attention &given, long long row, int count) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int v = 0; v < 4; ++v)
#pragma unroll
            for (int i = 0; i < OF_A_LANE; ++i) x[v][i] = 0.0f;
        for (int from = 0; from < given.count; from += 4) {
            float found[4][4][OF_A_LANE];
#pragma unroll
            for (int p = 0; p < 4; ++p)
#pragma unroll
                for (int v = 0; v < 4; ++v)
#pragma unroll
                    for (int i = 0; i < OF_A_LANE; ++i) {
                        const float *part = given.parts + ((long long)(from + p) * given.rows + row) * WIDE + lane;
                        found[p][v][i] = from + p < given.count && v < count ? __ldcg(part + begin[v] + 32 * i) : 0.0f;
                    }
#pragma unroll
            for (int p = 0; p < 4; ++p)
#pragma unroll
                for (int v = 0; v < 4; ++v)
#pragma unroll
                    for (int i = 0; i < OF_A_LANE; ++i) x[v][i] += found[p][v][i];
        }
#pragma unroll
        for (int v = 0; v < 4; ++v)
#pragma unroll
            for (int i = 0; i < OF_A_LANE; ++i) {
                if (BIAS && v < count) x[v][i] += widened(bias[v][lane + 32 * i]);
                x[v][i] = through(x[v][i]);
            }
    }

    INLINE void turn(int v, const u16 *gain, float eps, const Angles &angles) {
        const int lane = threadIdx.x % 32;
        if (NORM) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < OF_A_LANE; ++i) squares += x[v][i] * x[v][i];
#pragma unroll
            for (int offset = 16; offset; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
            const float scale = 1.0f / sqrtf(squares / SIZE + eps);
#pragma unroll
            for (int i = 0; i < OF_A_LANE; ++i) x[v][i] = through(widened(gain[lane + 32 * i]) * through(x[v][i] * scale));
        }
        float turned[OF_A_LANE];
#pragma unroll
        for (int i = 0; i < OF_A_LANE; ++i)
            turned[i] = i < OF_A_LANE / 2 ? -x[v][i + OF_A_LANE / 2] : x[v][i - OF_A_LANE / 2];
#pragma unroll
        for (int i = 0; i < OF_A_LANE; ++i)
            x[v][i] = through(through(x[v][i] * angles.cos[i]) + through(turned[i] * angles.sin[i]));
    }

    INLINE void store(int v, u16 *to) const {
#pragma unroll
        for (int i = 0; i < OF_A_LANE; ++i) to[threadIdx.x % 32 + 32 * i] = rounded(x[v][i]);
    }
};

// The new key and value, the third and fourth of ``heads``, to their page and to the tile in shared memory that has their
// place; nothing stands behind them there.
INLINE void put_entry(const attention &given, const Heads &heads, long long row, int k, int entry, char *tile) {
    const int place = entry % ENTRIES;
    const long long page = given.table[row * given.width + entry / PAGE];
    const long long at = ((page * KV + k) * PAGE + entry % PAGE) * SIZE;
    heads.store(2, given.keys + at);
    heads.store(3, given.values + at);
#pragma unroll
    for (int v = 0; v < 2; ++v)
#pragma unroll
        for (int i = 0; i < OF_A_LANE; ++i) {
            const int d = threadIdx.x % 32 + 32 * i;
            u16 *there = (u16 *)(tile + v * ENTRIES * ENTRY_BYTES);
            there[place * SIZE + ((d / 8) ^ (place & 7)) * 8 + d % 8] = rounded(heads.x[2 + v][i]);
            if (v)
                for (int later = place + 1; later < ENTRIES; ++later) there[later * SIZE + d] = 0;
        }
    __syncwarp();
}

// ---- entries ----

INLINE void copy_tile(const attention &given, const int *pages, int k, int entry, char *to) {
    const int lane = threadIdx.x % 32;
    const long long from = (((long long)pages[entry / PAGE] * KV + k) * PAGE + entry % PAGE) * SIZE;
#pragma unroll
    for (int kind = 0; kind < 2; ++kind)
#pragma unroll
        for (int i = 0; i < ENTRIES * SIZE / 256; ++i) {
            const int vector = i * 32 + lane, row = vector / (SIZE / 8), column = vector % (SIZE / 8);
            const u32 there = address(to + kind * ENTRIES * ENTRY_BYTES + row * ENTRY_BYTES + ((column ^ (row & 7)) * 16));
            const u16 *source = (kind ? given.values : given.keys) + from + vector * 8;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(there), "l"(source) : "memory");
        }
}

INLINE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
INLINE void wait_for_oldest() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }

typedef u32 Queries[STEPS][2];                // of 8 heads, as mma has them

INLINE void read_queries(Queries &queries, const char *from) {
    const char *mine = from + threadIdx.x % 32 / 4 * QUERY_BYTES + threadIdx.x % 4 * 4;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) queries[i][0] = *(const u32 *)(mine + i * 32), queries[i][1] = *(const u32 *)(mine + i * 32 + 16);
}

INLINE void begin_sums(Sums &sums) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) sums.values[i][0] = sums.values[i][1] = sums.values[i][2] = sums.values[i][3] = 0.0f;
    sums.weight[0] = sums.weight[1] = 0.0f;
    sums.largest[0] = sums.largest[1] = NOTHING;
}

// A tile of entries, the first ``seen`` of which count.
INLINE void attend(Sums &sums, const Queries &queries, const char *tile, int seen, float factor) {
    const int lane = threadIdx.x % 32;
    float scores[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const u32 keys = address(tile) + lane % 16 * ENTRY_BYTES;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        u32 a[4];
        const u32 at = keys + (((2 * i + lane / 16) ^ (lane & 7)) * 16);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(scores[0]), "+f"(scores[1]), "+f"(scores[2]), "+f"(scores[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(queries[i][0]), "r"(queries[i][1]));
    }
    const bool first = lane / 4 < seen, second = lane / 4 + 8 < seen;
    float kept[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float &a = scores[j], &b = scores[2 + j];
        a = first ? a * factor : NOTHING, b = second ? b * factor : NOTHING;
        float most = fmaxf(a, b);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
        most = fmaxf(most, sums.largest[j]);
        kept[j] = power(sums.largest[j] - most);
        a = first ? power(a - most) : 0.0f, b = second ? power(b - most) : 0.0f;
        sums.weight[j] = sums.weight[j] * kept[j] + a + b;
        sums.largest[j] = most;
    }
    u32 weights[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
            : "=r"(weights[half]) : "r"(halves(scores[2 * half], scores[2 * half + 1])));
    const int entry = lane / 16 * 8 + lane % 8;
    const u32 values = address(tile) + ENTRIES * ENTRY_BYTES + entry * ENTRY_BYTES;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        u32 a[4];
        float(&sum)[4] = sums.values[i];
        const u32 at = values + (((2 * i + lane / 8 % 2) ^ (entry & 7)) * 16);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = to_halves(a[j]), sum[j] *= kept[j % 2];
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights[0]), "r"(weights[1]));
    }
}

// ---- merging ----

struct Found {                                // what a warp leaves for the cluster, besides its sums
    float weight[8], largest[8];
};

struct Memory {                               // of a CTA
    char ring[WARPS][DEPTH * TILE];           // and in the end, sums
    Found found[WARPS];
    char queries[8 * QUERY_BYTES];
};

INLINE int sums_at(int warp, int head) { return warp * DEPTH * TILE + head * FOUND * 4; }

INLINE void leave(Sums &sums, Memory &memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float *to = (float *)(memory.ring[0] + sums_at(warp, head + j)) + lane / 4;
        float weight = sums.weight[j];
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) weight += __shfl_xor_sync(~0u, weight, offset);
        if (lane < 4) memory.found[warp].weight[head + j] = weight, memory.found[warp].largest[head + j] = sums.largest[j];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) to[i * 16] = sums.values[i][j], to[i * 16 + 8] = sums.values[i][2 + j];
    }
}

// What all warps of a cluster found, lane i first reading of the i-th warp.
struct Merger {
    u32 memories[SPLITS], mine;
    INLINE Merger(const Memory &memory) {
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) memories[i] = memory_of(memory.ring[0], i);
        mine = memory_of((const char *)memory.found, threadIdx.x % 32 / WARPS % SPLITS) + threadIdx.x % WARPS * sizeof(Found);
    }

    INLINE float merged(int head, int d) const {
        float weight = read(mine + head * 4), largest = read(mine + 32 + head * 4), values[ALL_WARPS];
#pragma unroll
        for (int i = 0; i < ALL_WARPS; ++i) values[i] = read(memories[i / WARPS] + sums_at(i % WARPS, head) + d * 4);
        if (threadIdx.x % 32 >= ALL_WARPS) weight = 0.0f, largest = NOTHING;
        float most = largest, value = 0.0f;
#pragma unroll
        for (int offset = 16; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
        const float factor = weight == 0.0f ? 0.0f : power(largest - most);
        weight *= factor;
#pragma unroll
        for (int offset = 16; offset; offset /= 2) weight += __shfl_xor_sync(~0u, weight, offset);
#pragma unroll
        for (int i = 0; i < ALL_WARPS; ++i) value += __shfl_sync(~0u, factor, i) * values[i];
        return value / weight;
    }
};

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(THREADS, 2)
    row_attention_kernel(const __grid_constant__ attention given) {
    extern __shared__ __align__(128) char bytes[];
    Memory &memory = *(Memory *)bytes;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int row = blockIdx.x / SPLITS / KV, k = blockIdx.x / SPLITS % KV, warp = threadIdx.x / 32;
    const int seen = (int)min(given.lengths[row] + 1, (long long)given.width * PAGE), tiles = (seen + ENTRIES - 1) / ENTRIES;
    const int *pages = given.table + (long long)row * given.width;
    const int each = (tiles + WARPS * SPLITS - 1) / (WARPS * SPLITS);
    const int low = (rank() * WARPS + warp) * each, high = min(low + each, tiles);
    char *slots = memory.ring[warp];
    for (int i = 0; i < DEPTH; ++i) {                                // entries of earlier steps: nobody writes them now
        if (low + i < high) copy_tile(given, pages, k, (low + i) * ENTRIES, slots + i * TILE);
        commit();
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const bool last = low < high && high == tiles;                   // this warp has the place of the new entry
    const Angles angles(given, row);
    Heads heads;
    heads.is_query(0, given, k, warp), heads.is_query(1, given, k, warp + WARPS);
    heads.begin[2] = (HEADS + k) * SIZE, heads.begin[3] = (HEADS + KV + k) * SIZE;
    heads.bias[2] = given.key_bias + k * SIZE, heads.bias[3] = given.value_bias + k * SIZE;
    heads.load(given, row, last ? 4 : 2);
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        heads.turn(v, given.query_gain, given.eps, angles);
        heads.store(v, (u16 *)(memory.queries + (warp + v * WARPS) * QUERY_BYTES));
    }
    if (last) heads.turn(2, given.key_gain, given.eps, angles);
    __syncthreads();

    Queries queries;
    Sums sums;
    read_queries(queries, memory.queries);
    begin_sums(sums);
    int at = 0;
    for (int tile = low; tile < high; ++tile) {
        wait_for_oldest();
        __syncwarp();
        if (tile + 1 == tiles) put_entry(given, heads, row, k, seen - 1, slots + at * TILE);
        attend(sums, queries, slots + at * TILE, seen - tile * ENTRIES, given.factor);
        __syncwarp();
        if (tile + DEPTH < high) copy_tile(given, pages, k, (tile + DEPTH) * ENTRIES, slots + at * TILE);
        commit();
        at = at + 1 == DEPTH ? 0 : at + 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    leave(sums, memory);
    meet();
    const Merger merger(memory);
    for (int i = warp; i < HEADS_OF_A_CTA * OF_A_LANE; i += WARPS) { // 32 places of a head
        const int head = rank() * HEADS_OF_A_CTA + i / OF_A_LANE, d = i % OF_A_LANE * 32 + threadIdx.x % 32;
        if (head < SHARE) given.out[((long long)row * HEADS + k * SHARE + head) * SIZE + d] = rounded(merger.merged(head, d));
    }
    meet();                                                          // nobody leaves before all have read its memory
}
