// Stress test of the core library, meant to run under a sanitizer (see stress.sh). Exits with 0, or
// prints the failed check.
#include "stress.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "../src/copy.h"
#include "../src/packed_times.h"
#include "../src/socket.h"
#include "../src/tcp_wire.h"
#include "afd_comm/group.h"

using namespace afd_comm;

namespace {

// Each slot has its own sender and receiver. The receiver checks every byte, then requests the next
// message.
void integrity(const char* backend, uint32_t connections, uint32_t rounds) {
  constexpr uint32_t slots = 3;
  Region region(slots, kSlotBytes, {"integrity", "127.0.0.1", 0});
  const auto trace = std::make_shared<PeerTrace>();
  region.trace(SlotRange{0, slots}, trace);
  std::vector<std::atomic<uint32_t>> wanted(slots);
  std::vector<std::thread> threads;
  for (uint32_t slot = 0; slot < slots; ++slot) {
    threads.emplace_back([&, slot] {
      const auto link = connect(region, backend, SlotRange{slot, 1}, connections);
      std::mt19937 random(slot);
      for (uint32_t seq = 1; seq <= rounds; ++seq) {
        while (wanted[slot].load(std::memory_order_acquire) < seq) std::this_thread::yield();
        std::vector<uint8_t> data(random() % kSlotBytes + 1, static_cast<uint8_t>(seq + slot));
        check(post(*link, slot, make_flag(1, seq), data) == Status::Ok, "post");
      }
      while (wanted[slot].load(std::memory_order_acquire) <= rounds) std::this_thread::yield();
    });
    threads.emplace_back([&, slot] {
      for (uint32_t seq = 1; seq <= rounds; ++seq) {
        wanted[slot].store(seq, std::memory_order_release);
        check(await(region, slot, make_flag(1, seq), kTimeoutUs) == Status::Ok, "arrival");
        const auto bytes = static_cast<uint64_t>(region.header(slot).nbytes);
        for (uint64_t i = 0; i < bytes; ++i)
          check(region.payload(slot)[i] == static_cast<uint8_t>(seq + slot), "payload");
      }
      wanted[slot].store(rounds + 1, std::memory_order_release);
    });
  }
  for (auto& thread : threads) thread.join();
  uint64_t noted = 0;
  for (const uint64_t n : trace->histogram(Path::Inbound).counts()) noted += n;
  check(noted == slots * rounds, "messages traced");
}

// One thread posts to several regions through groups; each receiver checks its items.
void groups(uint32_t rounds) {
  constexpr uint32_t peers = 3, item = 1000;
  std::vector<std::unique_ptr<Region>> regions;
  std::vector<std::unique_ptr<Link>> links;
  std::vector<Link*> pointers;
  for (uint32_t i = 0; i < peers; ++i) {
    regions.push_back(
        std::make_unique<Region>(1, kSlotBytes, RegionOptions{"group", "127.0.0.1", 0}));
    links.push_back(connect(*regions.back(), i % 2 ? "tcp" : "shm", SlotRange{0, 1}, 3));
    pointers.push_back(links.back().get());
  }
  Group group(pointers, kTimeoutUs, nullptr);
  std::atomic<uint32_t> done{0};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < peers; ++i)
    threads.emplace_back([&, i] {
      for (uint32_t seq = 1; seq <= rounds; ++seq) {
        check(await(*regions[i], 0, make_flag(1, seq), kTimeoutUs) == Status::Ok, "scatter");
        const Header header = regions[i]->header(0);
        check(header.count == i + 1, "count");
        for (uint64_t k = 0; k < static_cast<uint64_t>(header.nbytes); ++k)
          check(regions[i]->payload(0)[k] == static_cast<uint8_t>(seq + i), "scattered item");
        done.fetch_add(1);
      }
    });
  std::vector<uint8_t> data(6 * item);
  for (uint32_t seq = 1; seq <= rounds; ++seq) {
    const uint32_t counts[peers] = {1, 2, 3};
    for (uint32_t i = 0, at = 0; i < peers; ++i)
      for (uint32_t k = 0; k < (i + 1) * item; ++k) data[at++] = static_cast<uint8_t>(seq + i);
    Message message;
    message.parts[0] = Part{0, data.data(), item};
    message.part_count = 1;
    const uint64_t flags[peers] = {make_flag(1, seq), make_flag(1, seq), make_flag(1, seq)};
    check(group.post(message, Group::PerLink{flags, counts, nullptr}), "group post");
    while (done.load() < seq * peers) std::this_thread::yield();
  }
  for (auto& thread : threads) thread.join();
}

// Links of both backends take the same slots from each other while other threads call await(),
// wake() and gone().
void churn(uint64_t milliseconds) {
  constexpr uint64_t nbytes = 20000;
  Region region(2, nbytes, {"churn", "127.0.0.1", 0});
  const uint64_t end = now_ns() + milliseconds * 1000000;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      const std::vector<uint8_t> data(nbytes, 1);
      for (uint32_t seq = 1; now_ns() < end; ++seq) {
        std::unique_ptr<Link> link;
        try {
          link = connect(region, i % 2 ? "tcp" : "shm", SlotRange{0, 2}, i / 2 * 2 + 1);
        } catch (const CommError&) {
          continue;  // another link came before all connections were made
        }
        const Status status =
            post(*link, seq % 2, make_flag(static_cast<uint32_t>(i) + 1, seq), data);
        check(status == Status::Ok || status == Status::Closed || status == Status::PeerGone,
              "post status of a competing link");
      }
    });
  threads.emplace_back([&] {
    while (now_ns() < end) {
      await(region, 0, make_flag(9, 9), 500);
      region.gone(1);
    }
  });
  threads.emplace_back([&] {
    while (now_ns() < end) region.wake();
  });
  for (auto& thread : threads) thread.join();
  const auto last = connect(region, "shm", SlotRange{0, 2});
  check(post(*last, 0, make_flag(10, 1), {1, 2}) == Status::Ok, "last link");
  check(await(region, 0, make_flag(10, 1), kTimeoutUs) == Status::Ok, "last arrival");
}

// A sender that knows the token sends frames with random corruption.
void hostile(int connections) {
  Region region(3, 256, {"hostile", "127.0.0.1", 0});
  const TcpAddress to = parse_tcp(region.addresses()[1]);
  const SocketAddress address = resolve(to.host, to.port, true);
  std::mt19937_64 random(3);
  for (int i = 0; i < connections; ++i) {
    Fd fd(socket(AF_INET, SOCK_STREAM, 0));
    check(::connect(fd.get(), address.get(), address.length) == 0, "connect");
    Hello hello{kHelloMagic, kTcpVersion, {}, 1, 1, random(), 0, 0};
    std::memcpy(hello.token, to.token.data(), to.token.size());
    FrameHead head{};
    head.magic = kFrameMagic;
    head.slot = 1;
    head.flag = 1;
    head.part_count = 2;
    head.stripes = 1;
    head.sequence = 1;
    head.header.nbytes = 200;
    head.parts[0] = {0, 100};
    head.parts[1] = {100, 100};
    uint8_t frame[sizeof head + 200] = {};
    std::memcpy(frame, &head, sizeof head);
    for (uint64_t n = random() % 4; n > 0; --n)
      frame[random() % sizeof head] = static_cast<uint8_t>(random());
    static_cast<void>(send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL));
    for (uint64_t copies = 0; copies < 3; ++copies) {
      frame[offsetof(FrameHead, sequence)] += copies != 0;
      static_cast<void>(send(fd.get(), frame, sizeof frame, MSG_NOSIGNAL));
    }
  }
  for (uint32_t slot = 0; slot < 3; slot += 2)
    for (uint64_t i = 0; i < 256; ++i)
      check(region.payload(slot)[i] == 0, "an unclaimed slot stays unchanged");
  const auto link = connect(region, "tcp", SlotRange{0, 1});
  check(post(*link, 0, make_flag(1, 1), {1, 2, 3, 4}) == Status::Ok, "post after hostile frames");
  check(await(region, 0, make_flag(1, 1), kTimeoutUs) == Status::Ok,
        "arrival after hostile frames");
}

// The region is closed while other threads wait on it and write to it.
void close_in_use(int rounds) {
  for (int i = 0; i < rounds; ++i) {
    constexpr uint64_t nbytes = 20000;
    Region region(2, nbytes, {"closing", "127.0.0.1", 0});
    std::vector<std::thread> threads;
    for (uint32_t slot = 0; slot < 2; ++slot) {
      threads.emplace_back([&region, slot] {
        const auto link = connect(region, slot ? "tcp" : "shm", SlotRange{slot, 1}, 3);
        const std::vector<uint8_t> data(nbytes, 1);
        while (post(*link, slot, 1, data) == Status::Ok) {
        }
      });
      threads.emplace_back([&region, slot] {
        const Status status = await(region, slot, make_flag(2, 2), kTimeoutUs);
        check(status == Status::Closed || status == Status::PeerGone, "status at close");
      });
    }
    // Both links must have connected: a doorbell has rung in each slot.
    check(await(region, 0, 1, kTimeoutUs) == Status::Ok &&
              await(region, 1, 1, kTimeoutUs) == Status::Ok,
          "both links deliver");
    region.close();
    for (auto& thread : threads) thread.join();
  }
}

// Streaming copies of any size and alignment equal memcpy and write nothing outside the range.
void streaming(int rounds) {
  std::mt19937 random(4);
  std::vector<uint8_t> from(5000), to(5200), expected(5200);
  for (auto& byte : from) byte = static_cast<uint8_t>(random());
  for (int i = 0; i < rounds; ++i) {
    const std::size_t n = random() % 4900, in = random() % 100, out = random() % 200;
    std::fill(to.begin(), to.end(), static_cast<uint8_t>(i));
    std::fill(expected.begin(), expected.end(), static_cast<uint8_t>(i));
    stream_copy(to.data() + out, from.data() + in, n);
    std::memcpy(expected.data() + out, from.data() + in, n);
    check(to == expected, "streaming copy");
  }
}

// Buckets cover all times without gap or overlap; none is wider than 1/16 of its lower bound.
void buckets() {
  uint64_t lower = 0;
  for (std::size_t i = 0; i + 1 < Histogram::kBuckets; ++i) {
    const uint64_t upper = Histogram::upper_bound(i);
    check(upper > lower && (upper - lower) * 16 <= std::max<uint64_t>(lower, 16), "bucket width");
    check(Histogram::bucket_of(lower) == i && Histogram::bucket_of(upper - 1) == i, "bucket");
    lower = upper;
  }
  check(Histogram::bucket_of(UINT64_MAX) == Histogram::kBuckets - 1, "last bucket");
}

// Packed times unpack to the original values; times that do not fit are not packed.
void packing(int rounds) {
  std::mt19937_64 random(6);
  for (int i = 0; i < rounds; ++i) {
    const auto posted = static_cast<int64_t>(random() >> 2) + 1;
    const auto took = static_cast<int64_t>(random() >> (2 + random() % 62));
    const auto way = static_cast<int64_t>(random() >> (2 + random() % 62));
    const int64_t arrived = posted + took;
    const bool answers = i % 3 != 0;
    const Echo echo{answers ? 7 : 0, answers ? 7 + way : 0};
    const bool fits = took <= int64_t{UINT32_MAX} && (!answers || way < int64_t{kTimesPacked} - 1);
    SlotControl control{};
    check(pack_times(control.header, posted, arrived, echo) == fits,
          "times are packed exactly if they fit");
    if (!fits) {
      check(read_times(control, 5).posted == 0, "unpacked times read as 0");
      continue;
    }
    const Times times = read_times(control, 5);
    check(times.posted == posted && times.arrived == arrived && times.sent == arrived, "times");
    check(times.clock == 5 && (times.echo_posted != 0) == answers, "clock and echo");
    check(!answers || times.echo_arrived - times.echo_posted == way, "the echo's transfer time");
  }
}

}  // namespace

// Usage: stress [KILLS]. KILLS: number of killed senders and of killed receivers per backend.
int main(int argc, char** argv) {
  const int kills = argc > 1 ? atoi(argv[1]) : 100;
  streaming(2000);
  buckets();
  packing(100000);
  printf("copy, buckets and packed times ok\n");
  integrity("shm", 1, 150);
  integrity("tcp", 1, 150);
  integrity("tcp", 4, 150);
  printf("integrity ok\n");
  groups(200);
  printf("groups ok\n");
  churn(2000);
  printf("churn ok\n");
  hostile(2000);
  printf("hostile ok\n");
  close_in_use(20);
  printf("close in use ok\n");
#if !defined(__SANITIZE_THREAD__)
  // ThreadSanitizer supports neither fork() in a process with threads nor races between processes.
  for (const char* backend : {"shm", "tcp"}) {
    killed_sender(backend, kills);
    killed_receiver(backend, kills);
  }
#else
  static_cast<void>(kills);
#endif
  return 0;
}
