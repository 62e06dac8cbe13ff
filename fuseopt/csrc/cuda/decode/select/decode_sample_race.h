// Sampling by a race: see decode_sample_race.cu.
#pragma once

#include "cuda/common/launchers.h"

namespace fuseopt::decode_sample_race {

// Whether `launch` takes these filters on the current device.
bool takes(const DecodeSample& sample);

// Draws a token for each row. For one row it also ends the step; for more, `candidates` get them.
cudaError_t launch(const DecodeSample& sample, cudaStream_t stream);

}  // namespace fuseopt::decode_sample_race
