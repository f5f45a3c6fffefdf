// The tuned kernels alone, so that many classes of problems compile in little time.
#include "tuned.cuh"

extern "C" int pagedattn_run(const pagedattn_params* p, void* stream) {
  return pagedattn::run_tuned(*p, static_cast<cudaStream_t>(stream));
}
extern "C" const char* pagedattn_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
extern "C" int pagedattn_tuned_warps(void) {
  return pagedattn::TUNED_CLASS ? pagedattn::TUNED_WARPS : 0;
}
