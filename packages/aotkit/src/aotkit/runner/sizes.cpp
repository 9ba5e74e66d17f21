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

namespace {

using Symbols = std::unordered_map<std::string, int64_t>;

// A number as Python has it: an integer is exact, or an error where it is too large for 64 bits.
struct Number {
  bool whole;
  int64_t integer;
  double real;

  Number(int64_t value) : whole(true), integer(value), real(static_cast<double>(value)) {}
  Number(double value) : whole(false), integer(0), real(value) {}
  bool truth() const { return whole ? integer != 0 : real != 0; }
};

[[noreturn]] void too_large() { throw Error(AOTKIT_BAD_ARGUMENT, "a size is computed with a number that is too large"); }

int64_t as_integer(double value) {
  if (!(value >= -0x1p63 && value < 0x1p63)) too_large();  // nor is it nan
  return static_cast<int64_t>(value);
}

int64_t whole_result(const std::string &name, int64_t a, int64_t b) {
  int64_t result = 0;
  const bool overflows = name == "+"   ? __builtin_add_overflow(a, b, &result)
                         : name == "-" ? __builtin_sub_overflow(a, b, &result)
                                       : __builtin_mul_overflow(a, b, &result);
  if (overflows) too_large();
  return result;
}

bool less(const Number &a, const Number &b) { return a.whole && b.whole ? a.integer < b.integer : a.real < b.real; }

bool equal(const Number &a, const Number &b) { return a.whole && b.whole ? a.integer == b.integer : a.real == b.real; }

// Each operation on floats is rounded by itself. The quotient of integers is rounded once, so they have to be floats.
double quotient(const Number &a, const Number &b) {
  constexpr double most = 0x1p53;
  if (a.whole && b.whole && (std::fabs(a.real) > most || std::fabs(b.real) > most)) too_large();
  if (b.real == 0) throw Error(AOTKIT_BAD_ARGUMENT, "a size is divided by zero");
  return a.real / b.real;
}

Number of_two(const std::string &name, const Number &a, const Number &b) {
  if (a.whole && b.whole) {
    if (name == "+" || name == "-" || name == "*") return whole_result(name, a.integer, b.integer);
    if (name == "//") return floor_div(a.integer, b.integer);
    if (name == "%") return floor_mod(a.integer, b.integer);
  }
  if (name == "+") return a.real + b.real;
  if (name == "-") return a.real - b.real;
  if (name == "*") return a.real * b.real;
  if (name == "/") return quotient(a, b);
  if (name == "pow") return std::pow(a.real, b.real);
  if (name == "min") return less(b, a) ? b : a;
  if (name == "max") return less(a, b) ? b : a;
  if (name == "and") return a.truth() ? b : a;
  if (name == "or") return a.truth() ? a : b;
  if (name == "==") return int64_t{equal(a, b)};
  if (name == "!=") return int64_t{!equal(a, b)};
  if (name == "<") return int64_t{less(a, b)};
  if (name == "<=") return int64_t{less(a, b) || equal(a, b)};
  if (name == ">") return int64_t{less(b, a)};
  if (name == ">=") return int64_t{less(b, a) || equal(a, b)};
  unsupported("a size is computed by " + name);
}

Number of_one(const std::string &name, const Number &a) {
  if (name == "not") return int64_t{!a.truth()};
  if (name == "neg") return a.whole ? of_two("-", int64_t{0}, a) : Number(-a.real);
  if (name == "isqrt") return root(a.integer);
  if (name == "float") return a.real;
  if (name == "sqrt") return std::sqrt(a.real);
  const bool rounds = name == "trunc" || name == "floor" || name == "ceil" || name == "round";
  if (rounds && a.whole) return a;
  if (name == "trunc") return as_integer(a.real);
  if (name == "floor") return as_integer(std::floor(a.real));
  if (name == "ceil") return as_integer(std::ceil(a.real));
  if (name == "round") return as_integer(std::nearbyint(a.real));  // halves to even numbers
  unsupported("a size is computed by " + name);
}

Number number_of(const Json &tree, const Symbols &symbols) {
  if (tree.is(Json::Int)) return tree.integer;
  if (tree.is(Json::Float)) return tree.number;
  if (tree.is(Json::Bool)) return int64_t{tree.flag};
  if (tree.is(Json::String)) {
    const auto found = symbols.find(tree.string);
    if (found == symbols.end()) bad_file("a size depends on the unknown symbol " + tree.string);
    return found->second;
  }
  const std::string &name = tree.at(size_t(0)).text();
  if (tree.items.size() < 2) bad_file("a size lacks an operand");
  Number value = number_of(tree.items[1], symbols);
  if (tree.items.size() == 2) return of_one(name, value);
  for (size_t k = 2; k < tree.items.size(); ++k) value = of_two(name, value, number_of(tree.items[k], symbols));
  return value;
}

}  // namespace

bool holds(const Json &guard, const Symbols &symbols) { return number_of(guard, symbols).truth(); }

int64_t integer_size(const Json &tree, const Symbols &symbols) {
  const Number value = number_of(tree, symbols);
  return value.whole ? value.integer : as_integer(value.real);
}

}  // namespace aotkit
