// One core's peak of fused multiply-adds: independent chains, enough of them to keep every FMA unit busy.
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define CHAINS 12

typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));

const int flops_per_iteration = 2 * CHAINS * (int)(sizeof(Vector) / sizeof(float));

// Returns a value that depends on every chain, so that none is optimised away; nor is one found to be constant, since
// the compiler knows neither number.
float run_fma_chains(long iterations, float multiplier, float step) {
  Vector factor, addend, sum[CHAINS];
  for (int lane = 0; lane < (int)(sizeof(Vector) / sizeof(float)); ++lane) {
    factor[lane] = multiplier;
    addend[lane] = step * (float)lane;
  }
  for (int chain = 0; chain < CHAINS; ++chain) sum[chain] = addend * (float)chain;
  for (long i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int chain = 0; chain < CHAINS; ++chain) sum[chain] = sum[chain] * factor + addend;
  }
  float total = 0;
  for (int chain = 0; chain < CHAINS; ++chain) total += sum[chain][chain % (int)(sizeof(Vector) / sizeof(float))];
  return total;
}
