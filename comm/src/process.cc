#include "afd_comm/process.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "afd_comm/address.h"
#include "afd_comm/types.h"

namespace afd_comm {
namespace {

// pid_max is at most 2^22; 42 bits of clock ticks since boot last for a thousand years.
constexpr int kStartBits = 42;

std::string read_small(const char* path) {
  const Fd fd(open(path, O_RDONLY | O_CLOEXEC));
  if (!fd) return {};
  char text[1024];
  const ssize_t n = read(fd.get(), text, sizeof text);
  return n > 0 ? std::string(text, static_cast<size_t>(n)) : std::string();
}

}  // namespace

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

uint64_t coarse_now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

uint64_t clock_identity() {
  static const uint64_t identity = [] {
    uint64_t hash = 14695981039346656037u;  // FNV-1a
    struct stat ns{};
    std::string text = read_small("/proc/sys/kernel/random/boot_id");
    // Without a boot id nothing proves that two clocks are the same: compare equal to no process.
    if (text.empty()) text = token_text(random_token());
    // Kernels before 5.6 have no time namespaces, so there is one clock.
    if (stat("/proc/self/ns/time", &ns) == 0) text += std::to_string(ns.st_ino);
    for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
    return hash;
  }();
  return identity;
}

uint64_t deadline_after_us(int64_t timeout_us) {
  // One year is long enough, and the sum cannot overflow.
  constexpr int64_t year_us = int64_t{365} * 86400 * 1000000;
  if (timeout_us < 0) timeout_us = 0;
  if (timeout_us > year_us) timeout_us = year_us;
  return now_ns() + static_cast<uint64_t>(timeout_us) * 1000u;
}

void nap(uint64_t ns) {
  const timespec pause{0, static_cast<long>(ns)};
  nanosleep(&pause, nullptr);
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // The machine has more CPUs than the set can hold.
  if (sched_getaffinity(0, sizeof set, &set) != 0) return CPU_SETSIZE;
  return CPU_COUNT(&set);
}

std::string errno_text(int error) { return std::generic_category().message(error); }

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int Fd::release() { return std::exchange(fd_, -1); }

void Fd::reset() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

std::string machine_identity() {
  std::string out;
  for (const char c : read_small("/proc/sys/kernel/random/boot_id"))
    if (c != '-' && c != '\n') out += c;
  struct stat ns{};
  // Without a boot id or namespace nothing proves that pids mean the same: compare equal to no
  // process.
  if (out.empty() || stat("/proc/self/ns/pid", &ns) != 0) return "unknown";
  return out + "." + std::to_string(ns.st_ino);
}

ProcessIdentity identify_process(pid_t pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
  const std::string text = read_small(path);
  // The name in parentheses may hold anything, so parse from the last ')'.
  const size_t close_paren = text.rfind(')');
  if (close_paren == std::string::npos) return 0;
  char state = 0;
  unsigned long long start = 0;
  const int n =
      sscanf(text.c_str() + close_paren + 1,
             " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
             &state, &start);
  if (n != 2 || state == 'Z' || state == 'X') return 0;
  return (static_cast<uint64_t>(pid) << kStartBits) | (start & ((uint64_t{1} << kStartBits) - 1));
}

pid_t pid_of(ProcessIdentity identity) { return static_cast<pid_t>(identity >> kStartBits); }

ProcessWatch::ProcessWatch(ProcessIdentity identity) : identity_(identity) {
#ifdef SYS_pidfd_open
  pidfd_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid_of(identity), 0)));
#endif
  // The pidfd was opened by number: check only now that it is the right process.
  ended_ = identify_process(pid_of(identity)) != identity;
}

bool ProcessWatch::alive() const {
  if (ended_) return false;
  if (!pidfd_) return identify_process(pid_of(identity_)) == identity_;
  pollfd p{pidfd_.get(), POLLIN, 0};
  return poll(&p, 1, 0) <= 0;
}

std::thread start_thread(const std::string& name, std::function<void()> body) {
  std::thread thread;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread = std::thread(std::move(body));
  } catch (const std::exception& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw CommError("cannot start the thread " + name + ": " + error.what() +
                    "; raise the limit of processes");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

void prefer_cpus(std::thread& thread, const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus)
    if (cpu < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(cpu), &set);
  // Only a preference: the thread also works if the kernel refuses.
  if (CPU_COUNT(&set) != 0) pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
}

}  // namespace afd_comm
