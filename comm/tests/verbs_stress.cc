// Stress test of backend verbs: a receiver process and a sender process; every byte is checked.
//
//   verbs_stress CASE RX_PORTS TX_PORTS [SECONDS] [LIBRARY]
//
// Ports are comma separated. CASE:
//   sizes      64 B to 15 MB, from registered and unregistered memory, in one and several parts
//   soak       random sizes over several slots for SECONDS; meant for packet loss and port failures
//   kill       the sender is killed at random moments, then the receiver
//   stop       the sender is stopped, then the receiver: briefly, and until its queues are full
//   late       a newer writer takes the slots while an older one is sending
//   memlock    registration must fail with an error that names the limit to raise
//   offset     soak, with one stripe written 64 B too far: the payload check must detect it
//   short      soak, with one stripe 64 B too short: the payload check must detect it
// Exits with 0, or prints the failed check.
#include "verbs_stress.h"

namespace {

void sizes(const std::string& rx, const std::string& tx) {
  std::vector<uint64_t> list;
  for (uint64_t n = 64; n <= kMaxBytes; n *= 4)
    for (const uint64_t more : {uint64_t{0}, n / 2 + 8})
      list.push_back(std::min(n + more, kMaxBytes));
  for (const uint64_t n : {uint64_t{65}, uint64_t{4097}, uint64_t{917504}, kMaxBytes})
    list.push_back(n);
  Shared* shared = shared_page();
  const pid_t child = spawn([&] {
    await_region(shared);
    const auto link = connect(*shared, tx, SlotRange{0, kSlots});
    std::vector<uint8_t> registered(kMaxBytes), plain(kMaxBytes);
    link->register_memory(registered.data(), registered.size(), Device{});
    for (uint32_t i = 0; i < list.size(); ++i)
      for (uint32_t way = 0; way < 2; ++way) {
        const uint32_t seq = 2 * i + way + 1;
        while (shared->wanted[0].load(std::memory_order_acquire) < seq) usleep(50);
        std::vector<uint8_t>& data = way != 0 ? registered : plain;
        fill(data.data(), list[i], 0, seq);
        check(post(*link, 0, make_flag(1, seq), data.data(), list[i], 1 + seq % 4) == Status::Ok,
              "post");
        if (way != 0) {
          check(link->wait_sent(0, kTimeoutUs) == Status::Ok, "wait_sent");
          std::memset(data.data(), 0,
                      64);  // wait_sent() returned, so the receiver must not see this
        } else {
          std::memset(data.data(), 0, list[i]);  // post() copied unregistered memory
        }
      }
  });
  const auto region = make_region(rx);
  publish(shared, *region);
  std::vector<uint8_t> scratch(kMaxBytes);
  for (uint32_t i = 0; i < list.size(); ++i)
    for (uint32_t way = 0; way < 2; ++way) {
      const uint32_t seq = 2 * i + way + 1;
      shared->wanted[0].store(seq, std::memory_order_release);
      check(await(*region, 0, make_flag(1, seq), kTimeoutUs) == Status::Ok, "arrival");
      check(region->header(0).nbytes == static_cast<int64_t>(list[i]), "header");
      check(same(*region, 0, seq, list[i], scratch), "payload");
    }
  check(reap(child) == 0, "sender");
  printf("sizes: %zu sizes ok\n", list.size());
}

void report(const char* what, const Link& link, uint32_t slot, uint32_t seq, Status status) {
  fprintf(stderr, "sender: %s, message %u of slot %u: %s; link: %s\n", what, seq, slot,
          name_of(status), link.notes().c_str());
}

// Returns whether every payload was right.
bool soak(const std::string& rx, const std::string& tx, double seconds,
          const std::function<void()>& in_sender) {
  Shared* shared = shared_page();
  const pid_t child = spawn([&] {
    await_region(shared);
    in_sender();
    const auto link = connect(*shared, tx, SlotRange{0, kSlots});
    shared->claimed.fetch_add(1);
    std::vector<uint8_t> registered(kSlots * kMaxBytes);
    link->register_memory(registered.data(), registered.size(), Device{});
    uint32_t seq[kSlots] = {};
    uint64_t posted = 0;
    while (shared->stop.load(std::memory_order_acquire) == 0) {
      bool any = false;
      for (uint32_t slot = 0; slot < kSlots; ++slot) {
        if (shared->wanted[slot].load(std::memory_order_acquire) <= seq[slot]) continue;
        const uint64_t n = size_of(slot, ++seq[slot]);
        uint8_t* data = registered.data() + slot * kMaxBytes;
        Status status = link->wait_sent(slot, kTimeoutUs);
        if (status != Status::Ok) {
          report("wait_sent", *link, slot, seq[slot], status);
          broke("wait_sent");
        }
        fill(data, n, slot, seq[slot]);
        status = post(*link, slot, make_flag(1, seq[slot]), data, n, 2);
        if (status != Status::Ok) {
          report("post", *link, slot, seq[slot], status);
          broke("post");
        }
        any = true;
        ++posted;
      }
      if (!any) usleep(100);
    }
    for (uint32_t slot = 0; slot < kSlots && shared->stop.load() == kReport; ++slot)
      report("wait_sent", *link, slot, seq[slot], link->wait_sent(slot, 0));
    printf("soak: %llu messages posted; link: %s\n", static_cast<unsigned long long>(posted),
           link->notes().c_str());
  });
  const auto region = make_region(rx);
  std::vector<uint8_t> scratch(kMaxBytes);
  uint32_t seq[kSlots] = {};
  uint64_t taken = 0, bytes = 0, worst = 0;
  publish(shared, *region);
  bool right = true;
  while (shared->claimed.load() == 0) {
    usleep(1000);
    check(waitpid(child, nullptr, WNOHANG) == 0, "the sender is running until it connects");
  }
  printf("soak: started\n");
  fflush(stdout);
  const uint64_t end = now_ns() + static_cast<uint64_t>(seconds * 1e9);
  while (now_ns() < end && right) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      // Each message has its own content, so a duplicate or reordered one fails the payload check.
      shared->wanted[slot].store(++seq[slot], std::memory_order_release);
    }
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      const uint64_t since = now_ns();
      const Status status = await(*region, slot, make_flag(1, seq[slot]), kTimeoutUs);
      if (status != Status::Ok) {
        fprintf(stderr, "arrival of message %u in slot %u: %s after %.0f ms\n", seq[slot], slot,
                name_of(status), ms_since(since));
        shared->stop.store(kReport, std::memory_order_release);
        reap(child);  // its report is part of this failure
        broke("arrival");
      }
      worst = std::max(worst, now_ns() - since);
      const uint64_t n = size_of(slot, seq[slot]);
      check(region->header(slot).nbytes == static_cast<int64_t>(n), "header");
      check(region->header(slot).count == slot, "slot");
      right = right && same(*region, slot, seq[slot], n, scratch);
      bytes += n;
      ++taken;
    }
  }
  shared->stop.store(1, std::memory_order_release);
  check(reap(child) == 0, "sender");
  printf("soak: %llu messages, %.1f MB, all there once; longest wait %.0f ms\n",
         static_cast<unsigned long long>(taken), static_cast<double>(bytes) / 1e6,
         static_cast<double>(worst) / 1e6);
  return right;
}

void memlock(const std::string& rx) {
  try {
    make_region(rx);
  } catch (const CommError& error) {
    printf("memlock: %s\n", error.what());
    check(std::string(error.what()).find("ulimit -l unlimited") != std::string::npos, "remedy");
    return;
  }
  broke("the registration was not refused");
}

// Fault injection: wraps the provider's post_send and damages one stripe.
Verbs real;
int damaged = 0;
bool too_far = false;

int damage_one(ib::Qp* qp, ib::SendWr* first, ib::SendWr** bad) {
  for (ib::SendWr* wr = first; wr != nullptr; wr = wr->next) {
    if (wr->num_sge != 1 || wr->sg_list->length < 4096 || ++damaged != 20) continue;
    if (too_far) {
      wr->remote_addr += 64;
    } else {
      wr->sg_list->length -= 64;
    }
  }
  return real.post_send(qp, first, bad);
}

void damage(bool offset) {
  real = load_verbs(library);
  too_far = offset;
  Verbs table = real;
  table.post_send = damage_one;
  replace_verbs(library, table);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) broke("usage: verbs_stress CASE RX_PORTS TX_PORTS [SECONDS] [LIBRARY]");
  const std::string which = argv[1], rx = argv[2], tx = argv[3];
  const double seconds = argc > 4 ? atof(argv[4]) : 3;
  if (argc > 5) library = argv[5];
  try {
    if (which == "sizes") {
      sizes(rx, tx);
    } else if (which == "soak") {
      if (!soak(rx, tx, seconds, [] {})) broke("payload");
    } else if (which == "kill") {
      kill_either(rx, tx);
    } else if (which == "stop") {
      stop_either(rx, tx);
    } else if (which == "late") {
      late(rx, tx);
    } else if (which == "memlock") {
      memlock(rx);
    } else if (which == "offset" || which == "short") {
      if (soak(rx, tx, 60, [&] { damage(which == "offset"); }))
        broke("the damage was not detected");
      printf("%s: caught by the payload check\n", which.c_str());
      return kCaught;
    } else {
      broke("unknown case");
    }
  } catch (const CommError& error) {
    broke(error.what());
  }
  return 0;
}
