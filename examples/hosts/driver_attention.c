/* A decode step through the CUDA driver API, by the kernels and launches that Python planned once.
 *
 *   python -m cupyflash export --batch 8 --kv-len 500 --page-size 16 --dtype fp16 --lse --out call
 *   cc -std=c11 -Icall -I$CUDA_HOME/include examples/hosts/driver_attention.c -o attention -lcuda -lm
 *   ./attention call
 *
 * Queries are 0, so every key counts alike: of values 0 and 1 in turn the mean comes out, with the
 * logarithm of the number of keys. The second launch finds other lengths at the same addresses.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cupyflash_call.h"

enum { BATCH = 8, LONGEST = 500, PAGE = 16, PAGES = (LONGEST + PAGE - 1) / PAGE };

static void check(CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return;
  const char *text = "unknown error";
  cuGetErrorString(result, &text);
  fprintf(stderr, "%s: %s\n", what, text);
  exit(1);
}
#define CHECK(call) check(call, #call)

static void put(CUdeviceptr memory, int array, const void *values) {
  CHECK(cuMemcpyHtoD(memory, values, cupyflash_arrays[array].nbytes));
}

static void *get(CUdeviceptr memory, int array) {
  void *values = malloc(cupyflash_arrays[array].nbytes);
  if (!values) exit(1);
  CHECK(cuMemcpyDtoH(values, memory, cupyflash_arrays[array].nbytes));
  return values;
}

/* Token t of every page has the value t % 2 in all heads, as float16. */
static void fill_values(CUdeviceptr memory) {
  size_t count = cupyflash_arrays[CUPYFLASH_V].nbytes / 2;
  size_t row = count / ((size_t)BATCH * PAGES * PAGE);
  uint16_t *values = malloc(2 * count);
  if (!values) exit(1);
  for (size_t i = 0; i < count; ++i) values[i] = i / row % 2 ? 0x3c00 : 0;
  put(memory, CUPYFLASH_V, values);
  free(values);
}

static float half(uint16_t bits) { return ldexpf(1024 + (bits & 1023), (bits >> 10) - 25); }

/* Lengths are even, so the mean is 0.5. */
static int wrong(const CUdeviceptr *array, const int *lengths) {
  uint16_t *out = get(array[CUPYFLASH_OUT], CUPYFLASH_OUT);
  float *lse = get(array[CUPYFLASH_LSE], CUPYFLASH_LSE);
  int count = 0;
  for (size_t i = 0; i < cupyflash_arrays[CUPYFLASH_OUT].nbytes / 2; ++i)
    count += !(fabsf(half(out[i]) - 0.5f) < 1e-3f);
  for (size_t i = 0; i < cupyflash_arrays[CUPYFLASH_LSE].nbytes / 4; ++i)
    count += !(fabsf(lse[i] - logf(lengths[i % BATCH])) < 1e-5f);
  free(out);
  free(lse);
  return count;
}

int main(int count, char **arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: %s FOLDER\n", arguments[0]);
    return 2;
  }
  CUdevice device;
  CUcontext context;
  CUfunction function[CUPYFLASH_KERNELS];
  CUdeviceptr array[CUPYFLASH_ARRAYS];
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cupyflash_load(arguments[1], function));
  for (int i = 0; i < CUPYFLASH_ARRAYS; ++i) {
    CHECK(cuMemAlloc(&array[i], cupyflash_arrays[i].nbytes));
    CHECK(cuMemsetD8(array[i], 0, cupyflash_arrays[i].nbytes));
  }
  int starts[BATCH + 1], table[BATCH * PAGES], lengths[BATCH], errors = 0;
  for (int i = 0; i <= BATCH; ++i) starts[i] = i;
  for (int i = 0; i < BATCH * PAGES; ++i) table[i] = BATCH * PAGES - 1 - i;
  put(array[CUPYFLASH_CU_SEQLENS_Q], CUPYFLASH_CU_SEQLENS_Q, starts);
  put(array[CUPYFLASH_BLOCK_TABLE], CUPYFLASH_BLOCK_TABLE, table);
  fill_values(array[CUPYFLASH_V]);
  for (int step = 0; step < 2; ++step) {
    for (int i = 0; i < BATCH; ++i) lengths[i] = step ? LONGEST - 62 * i : 2 * i + 2;
    put(array[CUPYFLASH_SEQUSED_K], CUPYFLASH_SEQUSED_K, lengths);
    CHECK(cupyflash_launch(function, array, NULL));
    CHECK(cuCtxSynchronize());
    errors += wrong(array, lengths);
  }
  printf("%d values are wrong\n", errors);
  return errors != 0;
}
