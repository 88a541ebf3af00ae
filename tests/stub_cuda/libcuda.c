/* A driver whose only kernel is the merge of two float32 states, and whose memory is the host's.
 * It prints the launch, so that a test can compare it with the library's own plan. */
#include "cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cupyflash_kernels.h"

CUresult cuInit(unsigned flags) { return (int)flags; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == 301 ? "file not found" : "error";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = NULL;
  return device;
}
CUresult cuCtxSetCurrent(CUcontext context) { return context != NULL; }
CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }

CUresult cuModuleLoad(CUmodule *module, const char *path) {
  FILE *file = fopen(path, "rb");
  *module = NULL;
  if (!file) return 301;
  fclose(file);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = NULL;
  return module || strcmp(name, "merge_attn_states_fp32_fp32") ? 500 : CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *memory, size_t nbytes) {
  *memory = (CUdeviceptr)malloc(nbytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t nbytes) {
  memcpy((void *)target, source, nbytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t nbytes) {
  memcpy(target, (void *)source, nbytes);
  return CUDA_SUCCESS;
}

static float *at(uint64_t array, int64_t offset) { return (float *)(array + offset); }

static void merge(const MergeParams *p, int64_t token, int64_t head) {
  float a = *at(p->prefix_lse,
                token * p->prefix_lse_token_stride + head * p->prefix_lse_head_stride);
  float b = *at(p->suffix_lse,
                token * p->suffix_lse_token_stride + head * p->suffix_lse_head_stride);
  float sum = expf(a) + expf(b);
  *at(p->out_lse, token * p->out_lse_token_stride + head * p->out_lse_head_stride) = logf(sum);
  for (int d = 0; d < p->head_dim; ++d) {
    float x = *at(p->prefix_out, token * p->prefix_token_stride + head * p->prefix_head_stride +
                                     4 * d);
    float y = *at(p->suffix_out, token * p->suffix_token_stride + head * p->suffix_head_stride +
                                     4 * d);
    *at(p->out, token * p->out_token_stride + head * p->out_head_stride + 4 * d) =
        (expf(a) * x + expf(b) * y) / sum;
  }
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem,
                        CUstream stream, void **params, void **extra) {
  const MergeParams *p = params[0];
  if (function || stream || extra) return 1;
  printf("%u %u %u %u %u %u %u\n", grid_x, grid_y, grid_z, block_x, block_y, block_z, smem);
  for (int64_t token = 0; token < p->tokens; ++token)
    for (int64_t head = 0; head < p->heads; ++head) merge(p, token, head);
  return CUDA_SUCCESS;
}
