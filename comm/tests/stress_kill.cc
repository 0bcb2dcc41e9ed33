// Stress test: a peer process is killed at a random moment.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "stress.h"

namespace afd_comm {
namespace {

// Polls the clock so that the kill can land at any point of the child's work.
void kill_within(pid_t child, std::mt19937& random, int microseconds) {
  const uint64_t at = now_ns() + random() % static_cast<uint32_t>(microseconds) * 1000u;
  while (now_ns() < at) std::this_thread::yield();
  kill(child, SIGKILL);
}

// Messages are large, so that many kills land inside a copy.
constexpr uint64_t kBytes = 1 << 20;

// Posts two contents in turn, so that a torn message is visible.
class Sender {
 public:
  explicit Sender(Link& link) : link_(link) {}
  Status post(uint64_t flag, uint32_t seq) {
    return afd_comm::post(link_, 0, flag, seq % 2 ? odd_ : even_);
  }

 private:
  Link& link_;
  const std::vector<uint8_t> odd_ = std::vector<uint8_t>(kBytes, 1);
  const std::vector<uint8_t> even_ = std::vector<uint8_t>(kBytes, 2);
};

}  // namespace

// A sender process is killed at a random moment: while it connects, copies, rings, or in between.
void killed_sender(const char* backend, int rounds) {
  Region region(1, kBytes, {"killed", "127.0.0.1", 0});
  std::mt19937 random(1);
  uint64_t slowest = 0;
  int torn = 0;
  for (int i = 0; i < rounds; ++i) {
    const uint32_t generation = static_cast<uint32_t>(i) + 1;
    int ready[2];
    check(pipe(ready) == 0, "pipe");
    const pid_t child = fork();
    if (child == 0) {
      const auto link = connect(region, backend, SlotRange{0, 1}, 3);
      Sender sender(*link);
      check(write(ready[1], "", 1) == 1, "pipe");
      for (uint32_t seq = 1;; ++seq) sender.post(make_flag(generation, seq), seq);
    }
    // One in four is killed without waiting for its connection: it may never become a writer.
    const bool connected = i % 4 != 0;
    char byte = 0;
    check(!connected || read(ready[0], &byte, 1) == 1, "pipe");
    close(ready[0]);
    close(ready[1]);
    kill_within(child, random, 2000);
    const uint64_t since = now_ns();
    if (connected) {
      check(await(region, 0, make_flag(0xffffffff, 1), kTimeoutUs) == Status::PeerGone, "gone");
      slowest = std::max(slowest, now_ns() - since);
      check(now_ns() - since < 1000000000, "gone in time");
    }
    waitpid(child, nullptr, 0);
    check(!connected || region.gone(0), "a dead writer stays gone");
    const uint8_t* payload = region.payload(0);
    if (std::count(payload, payload + kBytes, payload[0]) != kBytes) ++torn;
    // The next writer can use the slot normally.
    const auto link = connect(region, backend, SlotRange{0, 1}, 3);
    const uint64_t flag = make_flag(generation, 0x80000000);
    check(Sender(*link).post(flag, 7) == Status::Ok, "post after a writer died");
    check(await(region, 0, flag, kTimeoutUs) == Status::Ok, "arrival after a writer died");
    check(std::count(payload, payload + kBytes, 1) == kBytes, "payload after a writer died");
  }
  printf("killed sender %s: %d kills, %d in the middle of a copy, noticed within %.0f ms\n",
         backend, rounds, torn, static_cast<double>(slowest) / 1e6);
}

// The receiver process is killed at a random moment while it receives posts.
void killed_receiver(const char* backend, int rounds) {
  std::mt19937 random(2);
  uint64_t slowest = 0;
  for (int i = 0; i < rounds; ++i) {
    int ready[2];
    check(pipe(ready) == 0, "pipe");
    const pid_t child = fork();
    if (child == 0) {
      Region region(1, kBytes, {"victim", "127.0.0.1", 0});
      for (const std::string& address : region.addresses()) {
        const std::string line = address + "\n";
        check(write(ready[1], line.data(), line.size()) == static_cast<ssize_t>(line.size()),
              "pipe");
      }
      for (uint32_t seq = 1;; ++seq) await(region, 0, make_flag(1, seq), kTimeoutUs);
    }
    close(ready[1]);
    std::vector<std::string> addresses(1);
    for (char c = 0; addresses.size() < 3 && read(ready[0], &c, 1) == 1;) {
      if (c == '\n')
        addresses.emplace_back();
      else
        addresses.back() += c;
    }
    close(ready[0]);
    addresses.pop_back();
    LinkOptions options;
    options.backend = backend;
    options.slots = SlotRange{0, 1};
    options.timeout_us = 2000000;
    const uint64_t kill_at = now_ns() + random() % 2000000u;
    std::thread killer([&] {
      while (now_ns() < kill_at) std::this_thread::yield();
      kill(child, SIGKILL);
    });
    try {
      const auto link = open_link(addresses, options);
      Sender sender(*link);
      Status status = Status::Ok;
      for (uint32_t seq = 1; status == Status::Ok; ++seq) {
        status = sender.post(make_flag(1, seq), seq);
        check(now_ns() < kill_at + 3000000000u, "a dead receiver is noticed in time");
      }
      check(status == Status::PeerGone, "status of a post to a dead receiver");
      check(sender.post(1, 1) == Status::PeerGone, "status of the following post");
    } catch (const CommError& error) {
      // The receiver died while the link was being opened; the error must have a message.
      check(std::strlen(error.what()) > 20, "error message");
    }
    killer.join();
    slowest = std::max(slowest, now_ns() - kill_at);
    waitpid(child, nullptr, 0);
  }
  printf("killed receiver %s: %d kills, noticed within %.0f ms\n", backend, rounds,
         static_cast<double>(slowest) / 1e6);
}

}  // namespace afd_comm
