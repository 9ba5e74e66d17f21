#include "fix_up.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/kthvalue.h>
#include <ATen/ops/median.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>

#include "errors.h"

namespace aotkit {

FixUp::FixUp(const Json &arguments, const std::function<size_t(const std::string &)> &buffer_named) {
  for (const Json &tensor : arguments.at(size_t(0)).list()) buffers_.push_back(buffer_named(tensor.at("buffer").text()));
  const auto literal = [&](size_t k) -> const Json & { return arguments.at(k).at("literal").at(1); };
  op_ = literal(1).text();
  dim_ = literal(2).whole();
  number_ = literal(3).whole();
  flag_ = literal(4).is(Json::Bool) ? literal(4).flag : literal(4).whole() != 0;
  if (op_ != "sort" && op_ != "topk" && op_ != "kthvalue" && op_ != "median")
    unsupported("the package leaves rows of " + op_ + " to ATen");
  if (buffers_.size() != 5) bad_file("a call of the launch plan is damaged");
}

void FixUp::operator()(std::vector<at::Tensor> &tensors) const {
  if (!tensors[buffers_[0]].item().toBool()) return;
  const at::Tensor &x = tensors[buffers_[2]];  // of a row without equal elements there is one right result only
  at::Tensor &values = tensors[buffers_[3]], &places = tensors[buffers_[4]];
  if (op_ == "sort") at::sort_out(values, places, x, dim_, flag_);
  else if (op_ == "topk") at::topk_out(values, places, x, number_, dim_, flag_, true);
  else if (op_ == "kthvalue") at::kthvalue_out(values, places, x, number_, dim_, flag_);
  else at::median_out(values, places, x, dim_, flag_);
}

}  // namespace aotkit
