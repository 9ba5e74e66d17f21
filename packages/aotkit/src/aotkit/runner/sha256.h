// SHA-256 and HMAC-SHA256 (FIPS 180-4, RFC 2104).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace aotkit {

class Sha256 {
 public:
  Sha256();
  void update(std::string_view data);
  std::string digest();  // 32 bytes; the object is used up

 private:
  void block(const unsigned char *data);

  std::array<uint32_t, 8> state_;
  std::string rest_;
  uint64_t length_ = 0;
};

class Hmac {
 public:
  explicit Hmac(std::string_view key);
  void update(std::string_view data) { inner_.update(data); }
  std::string digest();

 private:
  std::string outer_;
  Sha256 inner_;
};

std::string sha256(std::string_view data);
std::string in_hex(std::string_view bytes);

}  // namespace aotkit
