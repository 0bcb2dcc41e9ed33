#include "copy.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace afd_comm {
namespace {

// Measured on 2 cores of an AMD EPYC with 32 MiB of L3: up to 6 MiB memcpy wins by up to 2x, from
// 8 MiB on streaming, by 2x at 15 MB. Source and destination of both directions then fill the L3.
std::size_t stream_from() {
  const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
  constexpr std::size_t unknown = std::size_t{32} << 20;
  return (l3 > 0 ? static_cast<std::size_t>(l3) : unknown) / 4;
}

}  // namespace

void copy(void* to, const void* from, std::size_t nbytes) {
  static const std::size_t limit = stream_from();
  if (nbytes < limit) {
    std::memcpy(to, from, nbytes);
  } else {
    stream_copy(to, from, nbytes);
  }
}

void stream_copy(void* to, const void* from, std::size_t nbytes) {
#if defined(__SSE2__)
  constexpr std::size_t line = 64;
  auto* out = static_cast<uint8_t*>(to);
  auto* in = static_cast<const uint8_t*>(from);
  const std::size_t head =
      std::min(nbytes, (line - reinterpret_cast<uintptr_t>(out) % line) % line);
  std::memcpy(out, in, head);
  out += head;
  in += head;
  nbytes -= head;
  for (; nbytes >= line; nbytes -= line, in += line, out += line) {
    const auto* source = reinterpret_cast<const __m128i*>(in);
    auto* target = reinterpret_cast<__m128i*>(out);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1),
                  c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(out, in, nbytes);
  // Streaming stores are weakly ordered: without the fence the doorbell could become visible first.
  _mm_sfence();
#else
  std::memcpy(to, from, nbytes);
#endif
}

}  // namespace afd_comm
