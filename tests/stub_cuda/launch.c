/* Loads and launches an exported call, with arrays at made-up addresses. */
#include "cupyflash_call.h"

int main(int count, char **arguments) {
  CUfunction function[CUPYFLASH_KERNELS];
  CUdeviceptr array[CUPYFLASH_ARRAYS];
  for (int i = 0; i < CUPYFLASH_ARRAYS; ++i) array[i] = (CUdeviceptr)(i + 1) << 32;
  return count != 2 || cupyflash_load(arguments[1], function) ||
         cupyflash_launch(function, array, NULL) ||
         sizeof cupyflash_arrays / sizeof *cupyflash_arrays != CUPYFLASH_ARRAYS;
}
