#include "sizes.h"

#include <algorithm>
#include <cmath>

#include "errors.h"

namespace aotkit {

int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) throw Error(AOTKIT_BAD_ARGUMENT, "a size is divided by a size of zero");
  return a / b - ((a % b != 0) && ((a < 0) != (b < 0)));
}

int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

// The square root, rounded down, of a size below 2^50: see _float_sizes.py.
static int64_t root(int64_t size) { return static_cast<int64_t>(std::sqrt(static_cast<double>(std::max<int64_t>(size, 0)))); }

Expr Expr::read(const Json &json, const Names &names) {
  Expr made;
  if (json.is(Json::Int)) {
    made.value_ = json.integer;
    return made;
  }
  made.constant_ = false;
  for (const Json &term : json.list()) {
    Term read{term.at(size_t(0)).whole(), {}};
    for (size_t k = 1; k < term.items.size(); ++k) {
      const Json &atom = term.items[k];
      if (atom.is(Json::String)) {
        const auto found = atom.string.size() > 1 && atom.string[0] == '$' ? names.find(atom.string.substr(1)) : names.end();
        if (found == names.end()) bad_file("a size depends on the unknown symbol " + atom.string);
        read.atoms.push_back({Atom::Symbol, found->second, {}});
        continue;
      }
      const std::string &name = atom.at(size_t(0)).text();
      const auto kind = name == "floordiv" ? Atom::FloorDiv
                        : name == "mod"    ? Atom::Mod
                        : name == "min"    ? Atom::Min
                        : name == "max"    ? Atom::Max
                        : name == "isqrt"  ? Atom::Isqrt
                                           : Atom::Symbol;
      if (kind == Atom::Symbol) unsupported("a size is computed by " + name);
      const size_t operands = atom.items.size() - 1;
      const bool right = kind <= Atom::Mod ? operands == 2 : kind == Atom::Isqrt ? operands == 1 : operands > 0;
      if (!right) bad_file("a size lacks an operand");
      Atom call{kind, 0, {}};
      for (size_t j = 1; j < atom.items.size(); ++j) call.arguments.push_back(Expr::read(atom.items[j], names));
      read.atoms.push_back(std::move(call));
    }
    made.terms_.push_back(std::move(read));
  }
  return made;
}

int64_t Expr::operator()(const Values &values) const {
  if (constant_) return value_;
  int64_t total = 0;
  for (const Term &term : terms_) {
    int64_t product = term.factor;
    for (const Atom &atom : term.atoms) {
      if (atom.kind == Atom::Symbol) {
        product *= values[atom.symbol];
        continue;
      }
      int64_t value = atom.arguments[0](values);
      for (size_t k = 1; k < atom.arguments.size(); ++k) {
        const int64_t other = atom.arguments[k](values);
        value = atom.kind == Atom::FloorDiv ? floor_div(value, other)
                : atom.kind == Atom::Mod    ? floor_mod(value, other)
                : atom.kind == Atom::Min    ? std::min(value, other)
                                            : std::max(value, other);
      }
      if (atom.kind == Atom::Isqrt) value = root(value);
      product *= value;
    }
    total += product;
  }
  return total;
}

Exprs read_exprs(const Json &json, const Names &names) {
  Exprs made;
  for (const Json &item : json.list()) made.push_back(Expr::read(item, names));
  return made;
}

std::vector<int64_t> evaluate(const Exprs &exprs, const Values &values) {
  std::vector<int64_t> result;
  for (const Expr &expr : exprs) result.push_back(expr(values));
  return result;
}

double evaluate_tree(const Json &tree, const std::unordered_map<std::string, int64_t> &symbols) {
  if (tree.is(Json::Int)) return static_cast<double>(tree.integer);
  if (tree.is(Json::Float)) return tree.number;
  if (tree.is(Json::Bool)) return tree.flag;
  if (tree.is(Json::String)) {
    const auto found = symbols.find(tree.string);
    if (found == symbols.end()) bad_file("a size depends on the unknown symbol " + tree.string);
    return static_cast<double>(found->second);
  }
  const std::string &name = tree.at(size_t(0)).text();
  std::vector<double> v;
  for (size_t k = 1; k < tree.items.size(); ++k) v.push_back(evaluate_tree(tree.items[k], symbols));
  const bool two = v.size() == 2;
  if (v.empty()) bad_file("a size lacks an operand");
  const auto folded = [&](auto operation) {
    double value = v[0];
    for (size_t k = 1; k < v.size(); ++k) value = operation(value, v[k]);
    return value;
  };
  if (name == "+") return folded([](double a, double b) { return a + b; });
  if (name == "*") return folded([](double a, double b) { return a * b; });
  if (name == "min") return folded([](double a, double b) { return std::min(a, b); });
  if (name == "max") return folded([](double a, double b) { return std::max(a, b); });
  if (name == "and") return folded([](double a, double b) { return a && b; });
  if (name == "or") return folded([](double a, double b) { return a || b; });
  if (name == "not") return !v[0];
  if (name == "neg") return -v[0];
  if (name == "isqrt") return std::floor(std::sqrt(std::max(v[0], 0.0)));
  // As Python's floats: each operation is rounded by itself.
  if (name == "float") return v[0];
  if (name == "sqrt") return std::sqrt(v[0]);
  if (name == "trunc") return std::trunc(v[0]);
  if (name == "floor") return std::floor(v[0]);
  if (name == "ceil") return std::ceil(v[0]);
  if (name == "round") return std::nearbyint(v[0]);  // halves to even numbers
  if (two && name == "pow") return std::pow(v[0], v[1]);
  if (two && name == "/") return v[0] / v[1];
  if (two && name == "-") return v[0] - v[1];
  if (two && name == "//") return std::floor(v[0] / v[1]);
  if (two && name == "%") return v[0] - std::floor(v[0] / v[1]) * v[1];
  if (two && name == "==") return v[0] == v[1];
  if (two && name == "!=") return v[0] != v[1];
  if (two && name == "<") return v[0] < v[1];
  if (two && name == "<=") return v[0] <= v[1];
  if (two && name == ">") return v[0] > v[1];
  if (two && name == ">=") return v[0] >= v[1];
  unsupported("a size is computed by " + name);
}

int64_t computed_size(const Json &tree, const std::unordered_map<std::string, int64_t> &symbols) {
  constexpr double most = 9007199254740992.0;  // 2^53
  for (const auto &symbol : symbols)
    if (std::fabs(static_cast<double>(symbol.second)) > most)
      throw Error(AOTKIT_BAD_ARGUMENT, "a size is computed with floats of a number above 2^53");
  const double value = evaluate_tree(tree, symbols);
  if (!(std::fabs(value) <= most)) throw Error(AOTKIT_BAD_ARGUMENT, "a size that is computed with floats is no number, or above 2^53");
  return static_cast<int64_t>(value);
}

}  // namespace aotkit
