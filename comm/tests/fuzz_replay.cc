// Replaces libFuzzer where clang is missing: runs every file of a folder through the target, then
// random mutations of these files. Not guided by coverage.
// Usage: fuzz_replay FOLDER RUNS
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: fuzz_replay FOLDER RUNS\n"), 2;
  std::vector<std::vector<uint8_t>> seeds;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    LLVMFuzzerTestOneInput(seeds.back().data(), seeds.back().size());
  }
  if (seeds.empty())
    return fprintf(stderr, "fuzz: no inputs in %s; pass a folder with corpus files\n", argv[1]), 2;
  const long runs = atol(argv[2]);
  std::mt19937_64 random(1);
  for (long i = 0; i < runs; ++i) {
    std::vector<uint8_t> input = seeds[random() % seeds.size()];
    if (random() % 4 == 0) {
      const auto& other = seeds[random() % seeds.size()];
      input.insert(input.end(), other.begin(), other.end());
    }
    for (uint64_t n = random() % 5; n > 0 && !input.empty(); --n)
      input[random() % input.size()] = static_cast<uint8_t>(random());
    if (random() % 8 == 0) input.resize(random() % (input.size() + 1));
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  printf("%zu files and %ld mutated inputs: ok\n", seeds.size(), runs);
  return 0;
}
