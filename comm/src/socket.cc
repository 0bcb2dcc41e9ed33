#include "socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace afd_comm {
namespace {

constexpr uint64_t kSliceNs = 100000000;

void set_option(int fd, int level, int option, int value) {
  // Tuning only: a kernel that lacks one of these still works.
  static_cast<void>(setsockopt(fd, level, option, &value, sizeof value));
}

}  // namespace

SocketAddress resolve(const std::string& host, uint16_t port, bool numeric) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (numeric ? AI_NUMERICHOST : 0);
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0)
    throw CommError("cannot resolve tcp host '" + host + "': " + gai_strerror(error) +
                    "; give an IP address or a name of this host");
  SocketAddress out;
  std::memcpy(&out.storage, found->ai_addr, found->ai_addrlen);
  out.length = found->ai_addrlen;
  freeaddrinfo(found);
  return out;
}

std::string host_of(const SocketAddress& address) {
  char host[NI_MAXHOST] = {};
  getnameinfo(address.get(), address.length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

uint16_t port_of(const SocketAddress& address) {
  if (address.storage.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

bool is_wildcard(const SocketAddress& address) {
  if (address.storage.ss_family == AF_INET6)
    return IN6_IS_ADDR_UNSPECIFIED(
        &reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr);
  return reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr ==
         htonl(INADDR_ANY);
}

void tune(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 2);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 5000);
}

Poll poll_until(int fd, short events, uint64_t deadline, Interrupt interrupt) {
  while (true) {
    const uint64_t now = now_ns();
    const uint64_t left = deadline > now ? deadline - now : 0;
    pollfd p{fd, events, 0};
    // Rounded up: a millisecond late is better than a busy loop during the last one.
    const int n = poll(&p, 1, static_cast<int>((std::min(left, kSliceNs) + 999999) / 1000000));
    if (n > 0) return Poll::Ready;
    if (n < 0 && errno != EINTR) return Poll::Ready;  // the next call on the socket tells why
    if (interrupt != nullptr && interrupt()) return Poll::Interrupted;
    if (left == 0) return Poll::Deadline;
  }
}

}  // namespace afd_comm
