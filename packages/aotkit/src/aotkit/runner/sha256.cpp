#include "sha256.h"

#include <cmath>

namespace aotkit {
namespace {

// The first 32 bits of the fractions of square and cube roots of the first primes, as the standard defines them.
struct Constants {
  std::array<uint32_t, 8> start;
  std::array<uint32_t, 64> round;
};

uint32_t fraction(long double root) { return static_cast<uint32_t>(std::floor((root - std::floor(root)) * 4294967296.0L)); }

const Constants &constants() {
  static const Constants made = [] {
    Constants c;
    int count = 0;
    for (int n = 2; count < 64; ++n) {
      bool prime = true;
      for (int d = 2; d * d <= n; ++d) prime = prime && n % d;
      if (!prime) continue;
      if (count < 8) c.start[count] = fraction(sqrtl(n));
      c.round[count++] = fraction(cbrtl(n));
    }
    return c;
  }();
  return made;
}

uint32_t turned(uint32_t x, int by) { return x >> by | x << (32 - by); }

}  // namespace

Sha256::Sha256() : state_(constants().start) {}

void Sha256::block(const unsigned char *data) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i)
    w[i] = uint32_t(data[4 * i]) << 24 | uint32_t(data[4 * i + 1]) << 16 | uint32_t(data[4 * i + 2]) << 8 | data[4 * i + 3];
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3;
    const uint32_t b = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  std::array<uint32_t, 8> s = state_;
  for (int i = 0; i < 64; ++i) {
    const uint32_t mixed = turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25);
    const uint32_t one = s[7] + mixed + ((s[4] & s[5]) ^ (~s[4] & s[6])) + constants().round[i] + w[i];
    const uint32_t other = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) +
                           ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    s = {one + other, s[0], s[1], s[2], s[3] + one, s[4], s[5], s[6]};
  }
  for (int i = 0; i < 8; ++i) state_[i] += s[i];
}

void Sha256::update(std::string_view data) {
  length_ += data.size();
  if (!rest_.empty()) {
    const size_t missing = std::min(data.size(), 64 - rest_.size());
    rest_.append(data.substr(0, missing));
    data.remove_prefix(missing);
    if (rest_.size() < 64) return;
    block(reinterpret_cast<const unsigned char *>(rest_.data()));
    rest_.clear();
  }
  for (; data.size() >= 64; data.remove_prefix(64)) block(reinterpret_cast<const unsigned char *>(data.data()));
  rest_.assign(data);
}

std::string Sha256::digest() {
  const uint64_t bits = length_ * 8;
  std::string tail(1, '\x80');
  tail.append((119 - length_ % 64) % 64, '\0');
  for (int k = 7; k >= 0; --k) tail += static_cast<char>(bits >> (8 * k));
  update(tail);
  std::string result;
  for (uint32_t word : state_)
    for (int k = 3; k >= 0; --k) result += static_cast<char>(word >> (8 * k));
  return result;
}

std::string sha256(std::string_view data) {
  Sha256 hash;
  hash.update(data);
  return hash.digest();
}

Hmac::Hmac(std::string_view key) {
  std::string padded(key.size() > 64 ? sha256(key) : std::string(key));
  padded.resize(64, '\0');
  std::string first;
  for (char c : padded) first += static_cast<char>(c ^ 0x36), outer_ += static_cast<char>(c ^ 0x5C);
  inner_.update(first);
}

std::string Hmac::digest() { return sha256(outer_ + inner_.digest()); }

std::string in_hex(std::string_view bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (unsigned char c : bytes) text += digits[c >> 4], text += digits[c & 15];
  return text;
}

}  // namespace aotkit
