/* What this machine can do at most: read bandwidth, and the peak rates of int8, bfloat16 and float32 arithmetic, of its
 * vectors and, on x86-64 with AMX, of its tiles.
 *
 *   gcc -O3 -march=native -pthread limits.c -o limits && ./limits [THREADS] [REPETITIONS] [MEBIBYTES]
 *
 * One JSON object: median, min and max of each rate over the repetitions. null = no instruction of that kind, or no
 * permission of the system to use it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { MAX_THREADS = 512, MAX_REPETITIONS = 101, CHAINS = 12, ROUNDS = 20000000 };

/* KEEP hides a register's value from the compiler, so that nothing is hoisted or folded away. */
#if defined(__x86_64__)
#define KEEP(x) __asm__ volatile("" : "+v"(x))
#else
#define KEEP(x) __asm__ volatile("" : "+w"(x))
#endif

/* A kernel runs ROUNDS rounds of CHAINS independent accumulations; that many hide the latency of one. The sums are
 * named variables: of an array, gcc 12 leaves each one in memory. */
#define STEP(sum, accumulate) \
  KEEP(left);                 \
  KEEP(right);                \
  sum = accumulate(sum);      \
  KEEP(sum);
#define CHAIN_KERNEL(name, vector, zero, accumulate)                                                           \
  static void name(void) {                                                                                     \
    vector s0 = zero, s1 = zero, s2 = zero, s3 = zero, s4 = zero, s5 = zero, s6 = zero, s7 = zero;             \
    vector s8 = zero, s9 = zero, s10 = zero, s11 = zero, left = zero, right = zero;                            \
    for (long round = 0; round < ROUNDS; ++round) {                                                            \
      STEP(s0, accumulate)                                                                                     \
      STEP(s1, accumulate)                                                                                     \
      STEP(s2, accumulate)                                                                                     \
      STEP(s3, accumulate) STEP(s4, accumulate) STEP(s5, accumulate) STEP(s6, accumulate) STEP(s7, accumulate) \
          STEP(s8, accumulate) STEP(s9, accumulate) STEP(s10, accumulate) STEP(s11, accumulate)                \
    }                                                                                                          \
    (void)left, (void)right;                                                                                   \
  }

#if defined(__AVX512VNNI__)
#define INT8_NAME "avx512_vnni"
#define INT8_OPS 128 /* one operation per multiplication and one per addition */
#define INT8_STEP(sum) _mm512_dpbusd_epi32(sum, left, right)
CHAIN_KERNEL(int8_kernel, __m512i, _mm512_setzero_si512(), INT8_STEP)
#elif defined(__AVXVNNI__)
#define INT8_NAME "avx_vnni"
#define INT8_OPS 64
#define INT8_STEP(sum) _mm256_dpbusd_avx_epi32(sum, left, right)
CHAIN_KERNEL(int8_kernel, __m256i, _mm256_setzero_si256(), INT8_STEP)
#elif defined(__AVX2__)
#define INT8_NAME "avx2_maddubs"
#define INT8_OPS 64
#define INT8_STEP(sum) _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(left, right), left))
CHAIN_KERNEL(int8_kernel, __m256i, _mm256_setzero_si256(), INT8_STEP)
#elif defined(__ARM_FEATURE_DOTPROD)
#define INT8_NAME "neon_sdot"
#define INT8_OPS 32
#define INT8_STEP(sum) vdotq_s32(sum, vreinterpretq_s8_s32(left), vreinterpretq_s8_s32(right))
CHAIN_KERNEL(int8_kernel, int32x4_t, vdupq_n_s32(0), INT8_STEP)
#endif

#if defined(__AVX512BF16__)
#define BF16_NAME "avx512_bf16"
#define BF16_OPS 64
#define BF16_STEP(sum) _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right)
CHAIN_KERNEL(bf16_kernel, __m512, _mm512_setzero_ps(), BF16_STEP)
#elif defined(__ARM_FEATURE_BF16)
#define BF16_NAME "neon_bfdot"
#define BF16_OPS 16
#define BF16_STEP(sum) vbfdotq_f32(sum, vreinterpretq_bf16_f32(left), vreinterpretq_bf16_f32(right))
CHAIN_KERNEL(bf16_kernel, float32x4_t, vdupq_n_f32(0), BF16_STEP)
#endif

#if defined(__AVX512F__)
#define FP32_NAME "avx512_fma"
#define FP32_OPS 32
#define FP32_STEP(sum) _mm512_fmadd_ps(left, right, sum)
CHAIN_KERNEL(fp32_kernel, __m512, _mm512_setzero_ps(), FP32_STEP)
#elif defined(__FMA__)
#define FP32_NAME "avx2_fma"
#define FP32_OPS 16
#define FP32_STEP(sum) _mm256_fmadd_ps(left, right, sum)
CHAIN_KERNEL(fp32_kernel, __m256, _mm256_setzero_ps(), FP32_STEP)
#elif defined(__aarch64__)
#define FP32_NAME "neon_fma"
#define FP32_OPS 8
#define FP32_STEP(sum) vfmaq_f32(sum, left, right)
CHAIN_KERNEL(fp32_kernel, float32x4_t, vdupq_n_f32(0), FP32_STEP)
#endif

#if defined(__AMX_TILE__) && defined(__AMX_INT8__)
/* Six tiles of sums of 16 x 16 from two of 16 rows x 64 bytes: that many hide the latency of one. */
enum { TILE_CHAINS = 6, TILE_ROUNDS = 1000000, TILE_INT8_OPS = 2 * 16 * 16 * 64, TILE_BF16_OPS = 2 * 16 * 16 * 32 };
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileConfig;

static void configure_tiles(void) {
  TileConfig config = {.palette = 1};
  for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64, config.rows[tile] = 16;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}

#define TILE_KERNEL(name, accumulate)                    \
  static void name(void) {                               \
    configure_tiles();                                   \
    for (long round = 0; round < TILE_ROUNDS; ++round) { \
      accumulate(0, 6, 7);                               \
      accumulate(1, 6, 7);                               \
      accumulate(2, 6, 7);                               \
      accumulate(3, 6, 7);                               \
      accumulate(4, 6, 7);                               \
      accumulate(5, 6, 7);                               \
    }                                                    \
    _tile_release();                                     \
  }
TILE_KERNEL(tile_int8_kernel, _tile_dpbusd)
#if defined(__AMX_BF16__)
TILE_KERNEL(tile_bf16_kernel, _tile_dpbf16ps)
#endif

/* Linux gives the tiles' registers to a process that asks for them. */
static int may_use_tiles(void) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

typedef int64_t Line __attribute__((vector_size(64)));

static void read_all(const char* bytes, size_t size) {
  Line a = {0}, b = {0}, c = {0}, d = {0};
  for (const Line *line = (const Line*)bytes, *end = (const Line*)(bytes + size); line < end; line += 4) {
    a ^= line[0];
    b ^= line[1];
    c ^= line[2];
    d ^= line[3];
  }
  a ^= b ^ c ^ d;
  volatile int64_t sink = a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
  (void)sink;
}

typedef struct {
  int cpu;
  pthread_barrier_t* barrier;
  void (*kernel)(void); /* NULL: read `bytes` */
  const char* bytes;
  size_t size;
  double begin, end; /* seconds */
} Job;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void* run_job(void* argument) {
  Job* job = argument;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(job->cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
  pthread_barrier_wait(job->barrier);
  job->begin = now();
  if (job->kernel)
    job->kernel();
  else
    read_all(job->bytes, job->size);
  job->end = now();
  return NULL;
}

/* Seconds from the first thread's start to the last one's end. */
static double run_all(int threads, const int* cpus, void (*kernel)(void), const char* bytes, size_t size) {
  pthread_t handles[MAX_THREADS];
  Job jobs[MAX_THREADS];
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, NULL, (unsigned)threads);
  size_t share = size / (size_t)threads / 4096 * 4096;
  for (int i = 0; i < threads; ++i) {
    jobs[i] = (Job){cpus[i], &barrier, kernel, bytes + (size_t)i * share, share, 0, 0};
    if (pthread_create(&handles[i], NULL, run_job, &jobs[i])) {
      fprintf(stderr, "limits: cannot start thread %d\n", i);
      exit(1);
    }
  }
  double begin = 1e300, end = 0;
  for (int i = 0; i < threads; ++i) {
    pthread_join(handles[i], NULL);
    if (jobs[i].begin < begin) begin = jobs[i].begin;
    if (jobs[i].end > end) end = jobs[i].end;
  }
  pthread_barrier_destroy(&barrier);
  return end - begin;
}

static int by_value(const void* left, const void* right) {
  double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}

static void report(const char* key, const char* instruction, double* rates, int count) {
  qsort(rates, (size_t)count, sizeof *rates, by_value);
  printf(", \"%s\": {\"instruction\": \"%s\", \"median\": %.2f, \"min\": %.2f, \"max\": %.2f}", key, instruction,
         rates[count / 2], rates[0], rates[count - 1]);
}

typedef struct {
  int threads, repetitions;
  const int* cpus;
} Run;

static void measure_read(const Run* run, const char* bytes, size_t size) {
  double rates[MAX_REPETITIONS];
  size_t used = size / (size_t)run->threads / 4096 * 4096 * (size_t)run->threads;
  for (int i = 0; i < run->repetitions; ++i)
    rates[i] = (double)used / run_all(run->threads, run->cpus, NULL, bytes, size) / 1e9;
  report("read_gbps", "64-byte loads", rates, run->repetitions);
}

/* `operations` of one thread's run of the kernel; kernel NULL: this machine has none. */
static void measure_kernel(const Run* run, const char* key, const char* instruction, void (*kernel)(void),
                           double operations) {
  double rates[MAX_REPETITIONS];
  if (!kernel) {
    printf(", \"%s\": null", key);
    return;
  }
  for (int i = 0; i < run->repetitions; ++i)
    rates[i] = run->threads * operations / run_all(run->threads, run->cpus, kernel, NULL, 0) / 1e9;
  report(key, instruction, rates, run->repetitions);
}

static void measure_vectors(const Run* run) {
#ifdef INT8_NAME
  measure_kernel(run, "int8_gops", INT8_NAME, int8_kernel, (double)INT8_OPS * CHAINS * ROUNDS);
#else
  measure_kernel(run, "int8_gops", "", NULL, 0);
#endif
#ifdef BF16_NAME
  measure_kernel(run, "bf16_gflops", BF16_NAME, bf16_kernel, (double)BF16_OPS * CHAINS * ROUNDS);
#else
  measure_kernel(run, "bf16_gflops", "", NULL, 0);
#endif
#ifdef FP32_NAME
  measure_kernel(run, "fp32_gflops", FP32_NAME, fp32_kernel, (double)FP32_OPS * CHAINS * ROUNDS);
#else
  measure_kernel(run, "fp32_gflops", "", NULL, 0);
#endif
}

static void measure_tiles(const Run* run) {
  void (*int8)(void) = NULL, (*bf16)(void) = NULL;
  double int8_operations = 0, bf16_operations = 0;
#if defined(__AMX_TILE__) && defined(__AMX_INT8__)
  if (may_use_tiles()) {
    int8 = tile_int8_kernel, int8_operations = (double)TILE_INT8_OPS * TILE_CHAINS * TILE_ROUNDS;
#if defined(__AMX_BF16__)
    bf16 = tile_bf16_kernel, bf16_operations = (double)TILE_BF16_OPS * TILE_CHAINS * TILE_ROUNDS;
#endif
  }
#endif
  measure_kernel(run, "amx_int8_gops", "amx_int8", int8, int8_operations);
  measure_kernel(run, "amx_bf16_gflops", "amx_bf16", bf16, bf16_operations);
}

int main(int argc, char** argv) {
  cpu_set_t usable;
  int cpus[MAX_THREADS], num_cpus = 0;
  sched_getaffinity(0, sizeof usable, &usable);
  for (int cpu = 0; cpu < CPU_SETSIZE && num_cpus < MAX_THREADS; ++cpu)
    if (CPU_ISSET(cpu, &usable)) cpus[num_cpus++] = cpu;
  int threads = argc > 1 ? atoi(argv[1]) : num_cpus;
  int repetitions = argc > 2 ? atoi(argv[2]) : 7;
  long mebibytes = argc > 3 ? atol(argv[3]) : 1024;
  if (threads < 1 || threads > num_cpus || repetitions < 1 || repetitions > MAX_REPETITIONS || mebibytes < 1) {
    fprintf(stderr, "limits: expected 1..%d threads, 1..%d repetitions, 1 or more MiB\n", num_cpus, MAX_REPETITIONS);
    return 2;
  }
  size_t size = (size_t)mebibytes << 20;
  char* bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (bytes == MAP_FAILED) {
    fprintf(stderr, "limits: no %ld MiB of memory\n", mebibytes);
    return 1;
  }
  madvise(bytes, size, MADV_HUGEPAGE);
  memset(bytes, 1, size);
  Run run = {threads, repetitions, cpus};
  printf("{\"threads\": %d, \"mebibytes\": %ld, \"repetitions\": %d", threads, mebibytes, repetitions);
  measure_read(&run, bytes, size);
  measure_vectors(&run);
  measure_tiles(&run);
  printf("}\n");
  return 0;
}
