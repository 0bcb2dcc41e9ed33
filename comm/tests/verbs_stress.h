// Helpers shared by the cases of verbs_stress.cc: starting the two processes, their shared page,
// and message contents.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <sstream>
#include <string>

#include "../src/verbs_library.h"
#include "afd_comm/link.h"
#include "afd_comm/region.h"

using namespace afd_comm;

inline std::string library = "libibverbs.so.1";

// The cases of verbs_stress_ends.cc.
void kill_either(const std::string& rx, const std::string& tx);
void stop_either(const std::string& rx, const std::string& tx);
void late(const std::string& rx, const std::string& tx);

namespace {

constexpr int64_t kTimeoutUs = 20000000;
constexpr uint32_t kSlots = 3;
constexpr uint64_t kMaxBytes = 15 << 20;
constexpr int kCaught = 7;  // exit status of a payload check that failed
constexpr uint32_t kReport = 2;

[[noreturn]] void broke(const char* what) {
  fprintf(stderr, "verbs_stress: failed: %s\n", what);
  fflush(stderr);
  _exit(1);
}
void check(bool ok, const char* what) {
  if (!ok) broke(what);
}
const char* name_of(Status status) {
  constexpr const char* kNames[] = {"OK",         "DEADLINE", "PEER_GONE",
                                    "BAD_HEADER", "CAPACITY", "CLOSED"};
  return kNames[static_cast<int>(status)];
}

double ms_since(uint64_t since) { return static_cast<double>(now_ns() - since) / 1e6; }

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string item; std::getline(in, item, ',');) out.push_back(item);
  return out;
}

VerbsOptions verbs(const std::string& ports) {
  VerbsOptions options;
  options.host = "127.0.0.1";
  options.ports = split(ports);
  // 67 ms per try, the product's default. An emulated guest can wait longer than a few ms for a
  // core, and would lose the healthy path too.
  options.timeout = 14;
  options.library = library;
  return options;
}

// Memory that both processes share.
struct Shared {
  std::atomic<uint32_t> wanted[kSlots];  // sequence number the receiver is ready for
  std::atomic<uint32_t> stop;            // kReport: say what the link knows, then end
  std::atomic<uint32_t> claimed;         // links that have connected
  char addresses[4][512];
};

Shared* shared_page() {
  void* page =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  check(page != MAP_FAILED, "mmap");
  return new (page) Shared{};
}

// Deterministic content of message `seq` in `slot`.
void fill(uint8_t* out, uint64_t nbytes, uint32_t slot, uint32_t seq) {
  uint64_t state = (uint64_t{slot} << 32 | seq) * 0x9e3779b97f4a7c15u + 1;
  for (uint64_t i = 0; i < nbytes; i += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(out + i, &state, std::min<uint64_t>(8, nbytes - i));
  }
}

uint64_t size_of(uint32_t slot, uint32_t seq) {
  std::mt19937 random(slot * 7919 + seq);
  const uint64_t magnitude = uint64_t{64} << (random() % 15);
  return magnitude + random() % magnitude;
}

bool same(const Region& region, uint32_t slot, uint32_t seq, uint64_t nbytes,
          std::vector<uint8_t>& scratch) {
  fill(scratch.data(), nbytes, slot, seq);
  return std::memcmp(region.payload(slot), scratch.data(), nbytes) == 0;
}

Status await(Region& region, uint32_t slot, uint64_t flag, int64_t timeout_us) {
  Awaited awaited{slot, flag, Status::Deadline};
  region.wait(&awaited, 1, WaitFor::All, deadline_after_us(timeout_us), nullptr);
  return awaited.status;
}

std::unique_ptr<Link> connect(const Shared& shared, const std::string& ports, SlotRange slots,
                              int64_t timeout_us = kTimeoutUs) {
  LinkOptions options;
  options.backend = "verbs";
  options.slots = slots;
  options.timeout_us = timeout_us;
  options.verbs = verbs(ports);
  std::vector<std::string> addresses;
  for (const char* address : {shared.addresses[0], shared.addresses[1]})
    if (address[0] != 0) addresses.emplace_back(address);
  auto link = open_link(addresses, options);
  if (!link->notes().empty()) printf("notes: %s\n", link->notes().c_str());
  return link;
}

Status post(Link& link, uint32_t slot, uint64_t flag, const uint8_t* data, uint64_t nbytes,
            std::size_t parts) {
  Message message;
  message.slot = slot;
  message.flag = flag;
  message.header.nbytes = static_cast<int64_t>(nbytes);
  message.header.count = slot;
  message.part_count = parts;
  uint64_t at = 0;
  for (std::size_t i = 0; i < parts; ++i) {
    const uint64_t n = i + 1 == parts ? nbytes - at : nbytes / parts;
    message.parts[i] = Part{at, data + at, n};
    at += n;
  }
  return link.post(message);
}

// Runs `sender` in a child process, which must not use verbs before this.
pid_t spawn(const std::function<void()>& sender) {
  const pid_t child = fork();
  check(child >= 0, "fork");
  if (child != 0) return child;
  try {
    sender();
  } catch (const std::exception& error) {
    broke(error.what());
  }
  fflush(stdout);
  _exit(0);
}

void publish(Shared* shared, const Region& region) {
  for (std::size_t i = 0; i < region.addresses().size(); ++i)
    snprintf(shared->addresses[i], sizeof shared->addresses[i], "%s",
             region.addresses()[i].c_str());
  shared->wanted[0].store(1, std::memory_order_release);
}

void await_region(const Shared* shared) {
  while (shared->wanted[0].load(std::memory_order_acquire) == 0) usleep(1000);
}

std::unique_ptr<Region> make_region(const std::string& ports) {
  RegionOptions options;
  options.name = "stress";
  options.verbs = verbs(ports);
  return std::make_unique<Region>(kSlots, kMaxBytes, options);
}

int reap(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

}  // namespace
