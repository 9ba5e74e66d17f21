// A package: the manifest, the weights, and what stands around the compiled graph.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "archive.h"
#include "program.h"

namespace aotkit {

class Package {
 public:
  Package(const std::string &path, const char *signing_key);  // throws Error

  struct Output {
    std::string name;
    bool constant;
    size_t position;  // among what the program returns
  };

  size_t num_inputs() const { return arguments_.size(); }
  const std::vector<Output> &outputs() const { return outputs_; }
  const std::string &description() const { return description_; }
  std::vector<Value> run(std::vector<Value> inputs);  // results in the order of outputs(); throws Error

 private:
  struct Argument {
    std::string name;
    bool integer = false;
    at::ScalarType dtype = at::kFloat;
    std::vector<Json> shape, stride;
    Json symbol;
    bool written = false;
  };
  struct CopyBack {
    size_t input, result;
  };
  using Symbols = std::unordered_map<std::string, int64_t>;

  void choose_variant(const Json &manifest);
  void read_weights(const Json &manifest);
  void read_plan(const Json &plan);
  std::unordered_map<std::string, at::Tensor> read_constants(const Json &described, const std::string &name) const;
  void check_sizes(const std::vector<Value> &inputs, const Symbols &symbols) const;
  at::Tensor laid_out(const Argument &argument, const at::Tensor &value, const Symbols &symbols) const;

  Archive archive_;
  std::string description_, folder_;
  std::vector<Argument> arguments_;
  std::vector<at::Tensor> leading_;  // weights, which come before the arguments
  std::vector<Output> outputs_;
  std::vector<size_t> graph_inputs_, returns_;
  std::vector<std::pair<size_t, size_t>> duplicates_, apart_;
  std::vector<CopyBack> copies_;
  Json guards_, ranges_;
  std::unique_ptr<Program> program_;
};

}  // namespace aotkit
