// Whether this processor has what a package's kernels were generated with.
#pragma once

#include <string>
#include <vector>

namespace aotkit {

// The first of the features (LLVM's names) that this processor lacks, or that is not known; empty if there is none.
std::string missing_feature(const std::vector<std::string> &features);

}  // namespace aotkit
