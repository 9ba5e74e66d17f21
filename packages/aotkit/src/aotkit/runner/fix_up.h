// Rows of a sort that have equal elements, which a kernel leaves to ATen: ops/fixups.py of inductor-lower.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "json.h"

namespace aotkit {

struct FixUp {
  static constexpr const char *NAME = "aotkit_inductor_lower.fix_up_rows.default";

  FixUp(const Json &arguments, const std::function<size_t(const std::string &)> &buffer_named);  // throws Error
  void operator()(std::vector<at::Tensor> &tensors) const;

 private:
  std::vector<size_t> buffers_;  // whether any row is marked, which are, the argument, two results
  std::string op_;
  int64_t dim_, number_;
  bool flag_;
};

}  // namespace aotkit
