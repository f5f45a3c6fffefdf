// The tuned kernels alone, so that many classes of problems compile in little time.
#include "tuned.cuh"

extern "C" int pagedattn_run(const pagedattn_call* call) {
  return pagedattn::run_tuned(pagedattn::params_of(*call),
                              static_cast<cudaStream_t>(call->stream));
}
extern "C" int pagedattn_clustered(const pagedattn_call* call) {
  return pagedattn::clusters_serve(pagedattn::params_of(*call));
}
extern "C" const char* pagedattn_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
extern "C" int pagedattn_tuned_warps(void) {
  return pagedattn::TUNED_CLASS ? pagedattn::TUNED_WARPS : 0;
}
