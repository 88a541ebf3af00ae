/* Runs one precompiled kernel through the CUDA driver API: no Python, no CUDA runtime.
 *
 *   python -m cupyflash precompile --arch sm_90a --only merge_attn_states_fp32_fp32 --out kernels
 *   cc -std=c11 -Ikernels -I$CUDA_HOME/include examples/hosts/driver_api.c -o driver_api -lcuda -lm
 *   ./driver_api kernels/merge_attn_states_fp32_fp32.cubin
 *
 * It merges two attention states: half of the keys gave out 0 and log-sum-exp ln 2, the other half
 * 1 and ln 8, so together they are 0.8 and ln 10. Rows of token 0 have no prefix.
 */
#include <cuda.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cupyflash_kernels.h"

#define TOKENS 37
#define HEADS 4
#define DIM 64
#define STATE (TOKENS * HEADS * DIM)
#define ROWS (TOKENS * HEADS)

static void check(CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return;
  const char *text = "unknown error";
  cuGetErrorString(result, &text);
  fprintf(stderr, "%s: %s\n", what, text);
  exit(1);
}
#define CHECK(call) check(call, #call)

static CUdeviceptr upload(const float *values, size_t count) {
  CUdeviceptr memory;
  CHECK(cuMemAlloc(&memory, count * sizeof(float)));
  CHECK(cuMemcpyHtoD(memory, values, count * sizeof(float)));
  return memory;
}

static void launch(CUfunction kernel, MergeParams p) {
  unsigned grid[3], block[3], smem = merge_attn_states_fp32_fp32_launch(&p, grid, block);
  void *arguments[] = {&p};
  CHECK(cuLaunchKernel(kernel, grid[0], grid[1], grid[2], block[0], block[1], block[2], smem, NULL,
                       arguments, NULL));
}

/* Heads are contiguous, and an lse is [heads, tokens]. */
static MergeParams params(CUdeviceptr out, CUdeviceptr out_lse, const CUdeviceptr state[2],
                          const CUdeviceptr lse[2]) {
  const int64_t head = DIM * sizeof(float), token = HEADS * head;
  const int64_t lse_token = sizeof(float), lse_head = TOKENS * lse_token;
  return (MergeParams){
      .out = out, .out_token_stride = token, .out_head_stride = head,
      .prefix_out = state[0], .prefix_token_stride = token, .prefix_head_stride = head,
      .suffix_out = state[1], .suffix_token_stride = token, .suffix_head_stride = head,
      .prefix_lse = lse[0], .prefix_lse_head_stride = lse_head, .prefix_lse_token_stride = lse_token,
      .suffix_lse = lse[1], .suffix_lse_head_stride = lse_head, .suffix_lse_token_stride = lse_token,
      .out_lse = out_lse, .out_lse_head_stride = lse_head, .out_lse_token_stride = lse_token,
      .prefix_tokens = TOKENS, .out_scale_value = 1,
      .tokens = TOKENS, .heads = HEADS, .head_dim = DIM, .vectorised = 1,
  };
}

static int wrong(const float *out, const float *lse) {
  int count = 0;
  for (int i = 0; i < STATE; ++i) {
    float right = i < HEADS * DIM ? 1.f : 0.8f;
    count += !(fabsf(out[i] - right) < 1e-6f);
  }
  for (int i = 0; i < ROWS; ++i) {
    float right = i % TOKENS ? logf(10) : logf(8);
    count += !(fabsf(lse[i] - right) < 1e-6f);
  }
  return count;
}

int main(int count, char **arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: %s merge_attn_states_fp32_fp32.cubin\n", arguments[0]);
    return 2;
  }
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction kernel;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuModuleLoad(&module, arguments[1]));
  CHECK(cuModuleGetFunction(&kernel, module, "merge_attn_states_fp32_fp32"));

  static float state[2][STATE], lse[2][ROWS], out[STATE], out_lse[ROWS];
  for (int i = 0; i < STATE; ++i) state[0][i] = 0, state[1][i] = 1;
  for (int i = 0; i < ROWS; ++i) {
    lse[0][i] = i % TOKENS ? logf(2) : -INFINITY;
    lse[1][i] = logf(8);
  }
  CUdeviceptr states[2] = {upload(state[0], STATE), upload(state[1], STATE)};
  CUdeviceptr lses[2] = {upload(lse[0], ROWS), upload(lse[1], ROWS)};
  CUdeviceptr merged = upload(out, STATE), merged_lse = upload(out_lse, ROWS);

  launch(kernel, params(merged, merged_lse, states, lses));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemcpyDtoH(out, merged, sizeof(out)));
  CHECK(cuMemcpyDtoH(out_lse, merged_lse, sizeof(out_lse)));
  int errors = wrong(out, out_lse);
  printf("%d of %d values are wrong\n", errors, STATE + ROWS);
  return errors != 0;
}
