#include "afd_comm/address.h"

#include <sys/random.h>

#include <charconv>
#include <cstring>

#include "afd_comm/types.h"

namespace afd_comm {
namespace {

[[noreturn]] void malformed(const std::string& text) {
  throw CommError("'" + text +
                  "' is not a region address; pass Region.addresses of the peer unchanged");
}

template <typename T>
T number(const std::string& text, const std::string& whole) {
  T value{};
  const auto end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end) malformed(whole);
  return value;
}

template <std::size_t N>
std::array<uint8_t, N> bytes(const std::string& text, const std::string& whole) {
  std::array<uint8_t, N> out{};
  if (text.size() != 2 * out.size()) malformed(whole);
  for (size_t i = 0; i < out.size(); ++i) {
    const char* at = text.data() + 2 * i;
    const auto result = std::from_chars(at, at + 2, out[i], 16);
    if (result.ec != std::errc() || result.ptr != at + 2) malformed(whole);
  }
  return out;
}

template <std::size_t N>
std::string hex(const std::array<uint8_t, N>& value) {
  static const char digits[] = "0123456789abcdef";
  std::string out;
  for (const uint8_t byte : value) {
    out += digits[byte >> 4];
    out += digits[byte & 15];
  }
  return out;
}

// The fields of `a` without the scheme.
std::string rest(const ShmAddress& a) {
  return a.machine + ":" + std::to_string(a.pid) + ":" + std::to_string(a.fd) + ":" +
         std::to_string(a.bytes) + ":" + token_text(a.token);
}

ShmAddress shm_fields(const std::vector<std::string>& fields, std::size_t first,
                      const std::string& text) {
  ShmAddress out;
  out.machine = fields[first];
  out.pid = number<int>(fields[first + 1], text);
  out.fd = number<int>(fields[first + 2], text);
  out.bytes = number<uint64_t>(fields[first + 3], text);
  out.token = bytes<std::tuple_size<Token>::value>(fields[first + 4], text);
  if (out.pid <= 0 || out.fd < 0) malformed(text);
  return out;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> fields(1);
  bool bracket = false;
  for (const char c : text) {
    if (c == '[') bracket = true;
    if (c == ']') bracket = false;
    if (c == ':' && !bracket) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

}  // namespace

Token random_token() {
  Token out{};
  if (getrandom(out.data(), out.size(), 0) != static_cast<ssize_t>(out.size()))
    throw CommError(
        "the kernel gave no random bytes for a region token; check getrandom(2) is allowed");
  return out;
}

bool same_token(const uint8_t* a, const uint8_t* b) {
  unsigned difference = 0;
  for (size_t i = 0; i < Token{}.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

std::string token_text(const Token& value) { return hex(value); }

std::string format(const ShmAddress& a) { return "shm:" + rest(a); }

std::string format(const IpcAddress& a) {
  return "ipc:" + device_text(a.device) + ":" + std::to_string(a.pointer) + ":" + hex(a.handle) +
         ":" + rest(a.memory);
}

std::string format(const TcpAddress& a) {
  const bool v6 = a.host.find(':') != std::string::npos;
  return a.scheme + ":" + (v6 ? "[" + a.host + "]" : a.host) + ":" + std::to_string(a.port) + ":" +
         token_text(a.token);
}

std::string scheme_of(const std::string& address) { return address.substr(0, address.find(':')); }

ShmAddress parse_shm(const std::string& text) {
  const auto fields = split(text);
  if (fields.size() != 6 || fields[0] != "shm") malformed(text);
  return shm_fields(fields, 1, text);
}

IpcAddress parse_ipc(const std::string& text) {
  const auto fields = split(text);
  if (fields.size() != 10 || fields[0] != "ipc") malformed(text);
  IpcAddress out;
  out.device = parse_device(fields[1] + ":" + fields[2]);
  out.pointer = number<uint64_t>(fields[3], text);
  out.handle = bytes<std::tuple_size<MemoryHandle>::value>(fields[4], text);
  out.memory = shm_fields(fields, 5, text);
  return out;
}

TcpAddress parse_tcp(const std::string& text, const std::string& scheme) {
  const auto fields = split(text);
  if (fields.size() != 4 || fields[0] != scheme) malformed(text);
  TcpAddress out;
  out.scheme = scheme;
  out.host = fields[1];
  if (out.host.size() > 2 && out.host.front() == '[' && out.host.back() == ']')
    out.host = out.host.substr(1, out.host.size() - 2);
  out.port = number<uint16_t>(fields[2], text);
  out.token = bytes<std::tuple_size<Token>::value>(fields[3], text);
  if (out.host.empty() || out.port == 0) malformed(text);
  return out;
}

}  // namespace afd_comm
