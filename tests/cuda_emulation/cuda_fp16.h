#include "cuda_emulation.h"
