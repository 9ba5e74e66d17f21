// Sizes that depend on a call: sums of products as a launch plan has them, and trees as a manifest has them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "json.h"

namespace aotkit {

using Names = std::unordered_map<std::string, size_t>;  // of symbols, to positions in Values
using Values = std::vector<int64_t>;

// An expression of a launch plan: see launch_plan/codec.py of inductor-lower.
class Expr {
 public:
  static Expr read(const Json &json, const Names &names);  // throws Error
  int64_t operator()(const Values &values) const;
  bool is(int64_t value) const { return constant_ && value_ == value; }
  bool same(const Expr &other) const { return constant_ && other.constant_ && value_ == other.value_; }

 private:
  struct Atom {
    enum Kind { Symbol, FloorDiv, Mod, Min, Max, Isqrt } kind;
    size_t symbol;
    std::vector<Expr> arguments;
  };
  struct Term {
    int64_t factor;
    std::vector<Atom> atoms;
  };
  bool constant_ = true;
  int64_t value_ = 0;
  std::vector<Term> terms_;
};

using Exprs = std::vector<Expr>;
Exprs read_exprs(const Json &json, const Names &names);
std::vector<int64_t> evaluate(const Exprs &exprs, const Values &values);

// Of trees of a manifest, of guards and of sizes that are computed with floats: a number, a symbol, or a list of an
// operator and its operands. Both throw Error where a number is too large.
bool holds(const Json &guard, const std::unordered_map<std::string, int64_t> &symbols);
int64_t integer_size(const Json &tree, const std::unordered_map<std::string, int64_t> &symbols);

int64_t floor_div(int64_t a, int64_t b);
int64_t floor_mod(int64_t a, int64_t b);

}  // namespace aotkit
