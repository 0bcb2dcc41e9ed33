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

void set_option(int fd, int level, int option, int value) {
  // Tuning only: the link also works on a kernel that lacks one of these options.
  static_cast<void>(setsockopt(fd, level, option, &value, sizeof value));
}

[[noreturn]] void too_late(const TcpAddress& a) {
  throw CommError("no answer from the region at " + place(a) +
                  " in time; check that its process is running and no firewall is between");
}

void await(const Fd& fd, short events, uint64_t deadline, const TcpAddress& a,
           Interrupt interrupt) {
  const Poll result = poll_until(fd.get(), events, deadline, interrupt);
  if (result == Poll::Deadline) too_late(a);
  if (result == Poll::Interrupted)
    throw CommError("connecting to " + place(a) + " was interrupted");
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
    const int n = poll(&p, 1, static_cast<int>((std::min(left, kPollSliceNs) + 999999) / 1000000));
    if (n > 0) return Poll::Ready;
    if (n < 0 && errno != EINTR) return Poll::Ready;  // the next call on the socket tells why
    if (interrupt != nullptr && interrupt()) return Poll::Interrupted;
    if (left == 0) return Poll::Deadline;
  }
}

Fd listen_on(const std::string& host, uint16_t port, SocketAddress& bound, const char* option) {
  const std::string where = host + ":" + std::to_string(port);
  bound = resolve(host, port, false);
  if (is_wildcard(bound))
    throw CommError(
        std::string(option) + " '" + host +
        "' is a wildcard, which peers cannot connect to; give the address of one interface");
  Fd fd(socket(bound.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd)
    throw CommError("cannot open a socket: " + errno_text(errno) + "; raise the open-files limit");
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd.get(), bound.get(), bound.length) != 0 || listen(fd.get(), 128) != 0)
    throw CommError("cannot listen on " + where + ": " + errno_text(errno) +
                    "; use an address of this host and a free port (0 lets the kernel choose)");
  bound.length = sizeof bound.storage;
  getsockname(fd.get(), bound.get(), &bound.length);
  return fd;
}

std::string place(const TcpAddress& a) { return a.host + ":" + std::to_string(a.port); }

Fd connect_until(const TcpAddress& a, uint64_t deadline, Interrupt interrupt) {
  const SocketAddress to = resolve(a.host, a.port, true);
  Fd fd(socket(to.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd)
    throw CommError("cannot open a socket: " + errno_text(errno) + "; raise the open-files limit");
  int error = connect(fd.get(), to.get(), to.length) == 0 ? 0 : errno;
  if (error == EINPROGRESS || error == EINTR) {
    await(fd, POLLOUT, deadline, a, interrupt);
    socklen_t size = sizeof error;
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0)
    throw CommError("cannot connect to the region at " + place(a) + ": " + errno_text(error) +
                    "; check that its process is running and connect to the address it gives now");
  tune(fd.get());
  return fd;
}

void receive_all(const Fd& fd, void* out, std::size_t size, uint64_t deadline,
                 const TcpAddress& from, Interrupt interrupt) {
  for (std::size_t have = 0; have < size;) {
    await(fd, POLLIN, deadline, from, interrupt);
    const ssize_t n = recv(fd.get(), static_cast<char*>(out) + have, size - have, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0)
      throw CommError(
          "the service at " + place(from) +
          " refused the connection: its process is ending, or the address belongs to an earlier "
          "region or to something else; "
          "connect to the address the region's owner gives now");
    have += static_cast<std::size_t>(n);
  }
}

Fd accept_connection(const Fd& listener) {
  while (true) {
    Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) return fd;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN) {
      nap(5000000);
    }
    return fd;
  }
}

}  // namespace afd_comm
