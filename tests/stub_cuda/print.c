/* A driver that prints what it is passed; the environment variable SIZES has the bytes of each
 * parameter of a launch. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

CUresult cuModuleLoad(CUmodule *module, const char *path) {
  printf("module %s\n", path);
  *module = NULL;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  printf("function %s\n", name);
  *function = NULL;
  return module ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  printf("smem %d\n", value);
  return function || attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *shape, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  printf("map %d %u %llu", (int)type, rank, (unsigned long long)address);
  for (unsigned i = 0; i < rank; ++i) printf(" %llu", (unsigned long long)shape[i]);
  for (unsigned i = 1; i < rank; ++i) printf(" %llu", (unsigned long long)strides[i - 1]);
  for (unsigned i = 0; i < rank; ++i) printf(" %u", box[i]);
  for (unsigned i = 0; i < rank; ++i) printf(" %u", steps[i]);
  printf(" %d %d %d %d\n", (int)interleave, (int)swizzle, (int)promotion, (int)fill);
  return map ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem,
                        CUstream stream, void **params, void **extra) {
  if (function || stream || extra) return CUDA_ERROR_INVALID_VALUE;
  printf("launch %u %u %u %u %u %u %u\n", grid_x, grid_y, grid_z, block_x, block_y, block_z, smem);
  char *sizes = getenv("SIZES"), *end = sizes;
  for (long size; (size = strtol(sizes, &end, 10)) && end != sizes; sizes = end, ++params) {
    for (long i = 0; i < size; ++i) printf("%02x", ((unsigned char *)*params)[i]);
    printf("\n");
  }
  return CUDA_SUCCESS;
}
