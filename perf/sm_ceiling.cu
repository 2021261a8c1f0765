// Moves rows between addresses that a table names, and waits for no other GPU: what so many SMs can do at best.
//
// A table has ITEM_WORDS words an item: the number of sources (low half) and of targets (high half), the addresses of
// the sources, those of the targets. An item reads its sources, and writes their XOR (one source: a copy) to each of
// its targets. A warp takes a slice of an item; slices go round the CTAs, so that those of one row are on several SMs.
// Every kernel is launched with one CTA an SM, which the shared memory that it asks for ensures, and CTA i writes its
// %smid to sms[i]. perf/sm_ceiling.py names the kernels, their threads and their shared memory.

using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 LANES = 32;
constexpr u32 VECTOR_BYTES = 16;
constexpr u32 ITEM_WORDS = 16;
constexpr u32 MOST_SOURCES = 12;
constexpr u32 ALL = 0xffffffff;
constexpr u32 ROW = ROW_BYTES;  // given on the command line

#define PARAMETERS const u64 *items, u32 count, u32 *sms

__device__ void tell_sm(u32 *sms) {
  u32 sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (threadIdx.x == 0) sms[blockIdx.x] = sm;
}

// Lane k's word of an item; lanes 16 to 31 have those of lanes 0 to 15 again.
__device__ u64 load_word(const u64 *items, u32 item) {
  return items[(u64)item * ITEM_WORDS + threadIdx.x % ITEM_WORDS];
}

__device__ char *address(u64 word, u32 place, u64 offset) { return (char *)__shfl_sync(ALL, word, 1 + place) + offset; }

__device__ void add(uint4 &sum, const uint4 &one) {
  sum.x ^= one.x;
  sum.y ^= one.y;
  sum.z ^= one.z;
  sum.w ^= one.w;
}

// ---- loads and stores of 16 bytes a lane

// VECTORS: 16-byte vectors of a lane in a slice. TOGETHER: sources loaded at once after the first one, so a lane has
// (1 + TOGETHER) * VECTORS loads in flight.
template <u32 THREADS, u32 VECTORS, u32 TOGETHER>
__device__ void move_plain(PARAMETERS) {
  constexpr u32 STEP = LANES * VECTOR_BYTES, SLICE = VECTORS * STEP, SLICES = ROW / SLICE;
  constexpr u32 UNROLL = THREADS > 512 ? 1 : 2;  // 1024 threads have 64 registers each
  static_assert(ROW % SLICE == 0, "slices make a row");
  tell_sm(sms);
  const u32 units = count * SLICES, stride = THREADS / LANES * gridDim.x;
  u32 unit = threadIdx.x / LANES * gridDim.x + blockIdx.x;
  u64 coming = unit < units ? load_word(items, unit / SLICES) : 0;
  while (unit < units) {
    const u64 word = coming, offset = unit % SLICES * SLICE + threadIdx.x % LANES * VECTOR_BYTES;
    unit += stride;
    if (unit < units) coming = load_word(items, unit / SLICES);  // arrives while this item's rows do
    const u64 head = __shfl_sync(ALL, word, 0);
    const u32 sources = (u32)head, targets = (u32)(head >> 32);
    uint4 sum[VECTORS];
    const char *first = address(word, 0, offset);
#pragma unroll
    for (u32 v = 0; v < VECTORS; v++) sum[v] = __ldcs((const uint4 *)(first + v * STEP));
#pragma unroll UNROLL
    for (u32 k = 1; k < sources; k += TOGETHER) {
      uint4 more[TOGETHER][VECTORS];
#pragma unroll
      for (u32 j = 0; j < TOGETHER; j++) {
        if (k + j < sources) {
          const char *source = address(word, k + j, offset);
#pragma unroll
          for (u32 v = 0; v < VECTORS; v++) more[j][v] = __ldcs((const uint4 *)(source + v * STEP));
        } else {
#pragma unroll
          for (u32 v = 0; v < VECTORS; v++) more[j][v] = make_uint4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (u32 j = 0; j < TOGETHER; j++)
#pragma unroll
        for (u32 v = 0; v < VECTORS; v++) add(sum[v], more[j][v]);
    }
#pragma unroll UNROLL
    for (u32 k = 0; k < targets; k++) {
      char *target = address(word, sources + k, offset);
#pragma unroll
      for (u32 v = 0; v < VECTORS; v++) __stcg((uint4 *)(target + v * STEP), sum[v]);
    }
  }
}

#define PLAIN(name, threads, vectors, together)                                           \
  extern "C" __global__ __launch_bounds__(threads, 1) void name(PARAMETERS) {             \
    move_plain<threads, vectors, together>(items, count, sms);                            \
  }

PLAIN(plain_512_7x2, 512, 7, 1)
PLAIN(plain_512_4x4, 512, 4, 3)
PLAIN(plain_1024_4x2, 1024, 4, 1)
PLAIN(plain_1024_2x4, 1024, 2, 3)

// ---- bulk copies through a ring in shared memory

constexpr u32 SHARED_BYTES = 227 << 10;
constexpr u32 STAGES = 16;  // most items of a warp in its ring
constexpr u32 HEADER_BYTES = STAGES * (ITEM_WORDS + 1) * 8;

__device__ u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

__device__ void load_bulk(u32 to, const char *from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ void store_bulk(char *to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

__device__ void wait_parity(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A warp's part of shared memory: a barrier for each stage, the words of each stage's item, slots of SLICE bytes. An
// item takes as many slots as it has sources; their XOR comes into the first one. Slots are taken and given back in the
// order of items: PENDING items may be behind in being stored.
template <u32 WARPS, u32 SLICE, u32 PENDING>
__device__ void move_bulk(PARAMETERS) {
  extern __shared__ __align__(128) char memory[];
  constexpr u32 ROOM = (SHARED_BYTES / WARPS - HEADER_BYTES) / SLICE, SLOTS = ROOM < STAGES ? ROOM : STAGES;
  constexpr u32 SLICES = ROW / SLICE;
  static_assert(ROW % SLICE == 0, "slices make a row");
  static_assert(SLOTS >= MOST_SOURCES, "an item has room");
  tell_sm(sms);
  const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  char *own = memory + warp * (HEADER_BYTES + SLOTS * SLICE);
  u64 *words = (u64 *)own + STAGES;
  char *ring = own + HEADER_BYTES;
  const u32 barriers = shared_address(own), slots = shared_address(ring);
  if (lane == 0) {
    for (u32 stage = 0; stage < STAGES; stage++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * stage) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();

  const u32 units = count * SLICES, stride = WARPS * gridDim.x, begin = warp * gridDim.x + blockIdx.x;
  const u32 mine = begin < units ? (units - begin + stride - 1) / stride : 0;  // items of this warp: 0 .. mine - 1
  u32 issued = 0, taken = 0, freed = 0, used = 0, head = 0, tail = 0;
  u64 coming = mine ? load_word(items, begin / SLICES) : 0;
  while (taken < mine) {
    while (issued < mine) {  // load as many items as there is room for
      const u32 sources = (u32)__shfl_sync(ALL, coming, 0), stage = issued % STAGES;
      if (used + sources > SLOTS) break;
      const u64 offset = (begin + issued * stride) % SLICES * SLICE;
      if (lane < ITEM_WORDS) words[stage * ITEM_WORDS + lane] = coming;
      if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barriers + 8 * stage),
                     "r"(sources * SLICE)
                     : "memory");
      for (u32 k = 0; k < sources; k++) {
        const char *source = address(coming, k, offset);
        if (lane == 0) load_bulk(slots + (head + k) % SLOTS * SLICE, source, SLICE, barriers + 8 * stage);
      }
      head = (head + sources) % SLOTS;
      used += sources;
      issued++;
      if (issued < mine) coming = load_word(items, (begin + issued * stride) / SLICES);
    }
    __syncwarp();
    if (taken == issued) {  // the next item has no room before the last ones are stored
      if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
      freed = taken;
      used = 0;
      continue;
    }
    const u32 stage = taken % STAGES;
    const u64 offset = (begin + taken * stride) % SLICES * SLICE;
    const u64 counts = words[stage * ITEM_WORDS];
    const u32 sources = (u32)counts, targets = (u32)(counts >> 32);
    wait_parity(barriers + 8 * stage, taken / STAGES & 1);
    char *sum = ring + tail * SLICE;
    if (sources > 1) {
#pragma unroll 2
      for (u32 at = lane * VECTOR_BYTES; at < SLICE; at += LANES * VECTOR_BYTES) {
        uint4 value = *(uint4 *)(sum + at);
#pragma unroll 4
        for (u32 k = 1; k < sources; k++) add(value, *(uint4 *)(ring + (tail + k) % SLOTS * SLICE + at));
        *(uint4 *)(sum + at) = value;
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    if (lane == 0) {
      for (u32 k = 0; k < targets; k++)
        store_bulk((char *)words[stage * ITEM_WORDS + 1 + sources + k] + offset, shared_address(sum), SLICE);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
    }
    __syncwarp();
    tail = (tail + sources) % SLOTS;
    taken++;
    for (; freed + PENDING < taken; freed++) used -= (u32)words[freed % STAGES * ITEM_WORDS];
    __syncwarp();  // before words are overwritten
  }
  if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#define BULK(name, warps, slice, pending)                                                 \
  extern "C" __global__ __launch_bounds__(warps * LANES, 1) void name(PARAMETERS) {       \
    move_bulk<warps, slice, pending>(items, count, sms);                                  \
  }

BULK(bulk_1_14336, 1, 14336, 4)
BULK(bulk_4_3584, 4, 3584, 4)
BULK(bulk_4_3584_sums, 4, 3584, 1)
BULK(bulk_8_2048_sums, 8, 2048, 1)
