// What       the dropout generator under a standard battery of statistical tests (TestU01, L'Ecuyer and Simard 2007);
//            a second implementation, which tests/test_rng_battery.py compares with the NumPy backend's
// Use        rng words SCRAMBLE ORDER VIEW COUNT       prints the first words, hexadecimal
//            rng write SCRAMBLE ORDER VIEW             writes words to standard output for ever, for other programs
//            rng smallcrush|crush SCRAMBLE ORDER VIEW  runs that battery of TestU01 (compiled with -DTESTU01)
//            rng patterns SCRAMBLE ORDER words         runs the chi-square tests below (likewise)
//            A test's line is a JSON record; `python -m bench.rng` compiles this, runs everything and keeps a record.
// Scrambles  of the state's four words s to draws. product: s[w] * C
//            folded: the product, its low half plus (exclusive or) its high half
//            added: s[w] * C + s[w + 1], and s[3] * C, then folded: the library's
// Orders     in which the words (two draws each, the scrambled state) of nodes, steps, lanes are consumed; see kOrders
// Views      of the words: as they are, their low or high halves packed (the earlier one on top), each also with its
//            bits reversed, and drops: one bit a draw, set where it falls below one half
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint32_t u32;
typedef uint64_t u64;

enum { kGenerators = 8, kWords = 4, kMaxSteps = 64, kMaxBlock = kGenerators * kWords * kMaxSteps };

typedef enum { STEPS_OUTSIDE, LANES_OUTSIDE, NODES_OF_ONE_STEP, NODES_OF_ONE_WORD, SEEDS } Arrangement;

typedef struct {
  const char* name;
  Arrangement arrangement;
  u32 steps;  // of 64 columns
  u64 seed, node;
} Order;

#define SEED 0x299F31D0A4093822u
static const Order kOrders[] = {
    {"columns", STEPS_OUTSIDE, 10, SEED, 0},                       // node after node, columns in order, H = 640
    {"nodes", NODES_OF_ONE_STEP, 6, SEED, 0},                      // one step of one lane (8 columns) along the nodes
    {"column", NODES_OF_ONE_WORD, 6, SEED, 0},                     // one word (2 columns) along the nodes
    {"lanes", LANES_OUTSIDE, 10, SEED, 0},                         // of each node one lane after another
    {"wide", LANES_OUTSIDE, kMaxSteps, SEED, 0},                   // the same for H = 4096
    {"seeds", SEEDS, 10, 0, 0},                                    // seeds 0 to 7 by turns
    {"high", STEPS_OUTSIDE, 10, UINT64_MAX, (1ull << 32) - 4096},  // the last seed, nodes across 2^32
};

static const Order* order;
static enum { PRODUCT, FOLDED, ADDED } scramble;
static u64 block;  // of the stream: eight generators
static u32 buffer[kMaxBlock], length, position;

static void start(u32 s[kWords][kGenerators]) {
  const Arrangement how = order->arrangement;
  u32 k0[kGenerators], k1[kGenerators];
  for (u32 g = 0; g < kGenerators; ++g) {
    u64 seed = order->seed, node = order->node + block;
    u32 lane = g;
    if (how == SEEDS) {
      seed += g;
      node = block / kGenerators;
      lane = block % kGenerators;
    } else if (how == NODES_OF_ONE_STEP || how == NODES_OF_ONE_WORD) {
      node = kGenerators * block + g;
      lane = 3;
    }
    s[0][g] = (u32)node;
    s[1][g] = (u32)(node >> 32);
    s[2][g] = lane;
    s[3][g] = 0;
    k0[g] = (u32)seed;
    k1[g] = (u32)(seed >> 32);
  }
  for (int round = 0; round < 10; ++round) {
    for (u32 g = 0; g < kGenerators; ++g) {
      const u64 p = (u64)0xD2511F53u * s[0][g], q = (u64)0xCD9E8D57u * s[2][g];
      s[0][g] = (u32)(q >> 32) ^ s[1][g] ^ k0[g];
      s[1][g] = (u32)q;
      s[2][g] = (u32)(p >> 32) ^ s[3][g] ^ k1[g];
      s[3][g] = (u32)p;
      k0[g] += 0x9E3779B9u;
      k1[g] += 0xBB67AE85u;
    }
  }
}

static void step(u32 s[kWords][kGenerators]) {
  for (u32 g = 0; g < kGenerators; ++g) {
    const u32 shifted = s[1][g] << 9;
    s[2][g] ^= s[0][g];
    s[3][g] ^= s[1][g];
    s[1][g] ^= s[2][g];
    s[0][g] ^= s[3][g];
    s[2][g] ^= shifted;
    s[3][g] = s[3][g] << 11 | s[3][g] >> 21;
  }
}

static void refill(void) {
  const Arrangement how = order->arrangement;
  u32 s[kWords][kGenerators];
  start(s);
  length = 0;
  for (u32 i = 0; i < order->steps; ++i, step(s)) {
    const int only_last = how == NODES_OF_ONE_STEP || how == NODES_OF_ONE_WORD;
    if (only_last && i + 1 < order->steps) continue;
    for (u32 g = 0; g < kGenerators; ++g) {
      for (u32 word = 0; word < kWords; ++word) {
        if (how == NODES_OF_ONE_WORD && word != 2) continue;
        const u32 at = how == LANES_OUTSIDE ? (g * order->steps + i) * kWords + word : length;
        const u32 next = scramble == ADDED && word < 3 ? s[word + 1][g] : 0;
        const u32 draws = s[word][g] * 0x9E3779B1u + next;
        buffer[at] = scramble == PRODUCT ? draws : draws ^ draws >> 16;
        ++length;
      }
    }
  }
  ++block;
  position = 0;
}

static inline u32 words(void) {
  if (position == length) refill();
  return buffer[position++];
}

static u32 low(void) {
  const u32 first = words();
  return first << 16 | (words() & 0xFFFFu);
}

static u32 high(void) {
  const u32 first = words();
  return (first & 0xFFFF0000u) | words() >> 16;
}

static u32 drops(void) {
  u32 bits = 0;
  for (int i = 0; i < 16; ++i) {
    const u32 word = words();
    bits = bits << 2 | ((word & 0xFFFFu) < 0x8000u) << 1 | ((word >> 16) < 0x8000u);
  }
  return bits;
}

static u32 reversed(u32 x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0F0F0F0Fu) | (x & 0x0F0F0F0Fu) << 4;
  return __builtin_bswap32(x);
}

static u32 words_reversed(void) { return reversed(words()); }
static u32 low_reversed(void) { return reversed(low()); }
static u32 high_reversed(void) { return reversed(high()); }

static const struct {
  const char* name;
  u32 (*next)(void);
} kViews[] = {
    {"words", words},
    {"low", low},
    {"high", high},
    {"drops", drops},
    {"words_reversed", words_reversed},
    {"low_reversed", low_reversed},
    {"high_reversed", high_reversed},
};

#ifdef TESTU01
#include "bbattery.h"
#include "fbar.h"
#include "swrite.h"
#include "unif01.h"

static void report(const char* test, double p) {
  printf("{\"test\": \"%s\", \"p\": %.17g}\n", test, p);
  fflush(stdout);
}

// One test at a time, on one stream that goes on, so that what has finished is known.
static void battery(unif01_Gen* generator, void (*repeat)(unif01_Gen*, int*), int n_tests) {
  swrite_Basic = FALSE;
  for (int test = 1; test <= n_tests; ++test) {
    int times[256] = {0};
    times[test] = 1;
    repeat(generator, times);
    for (int i = 0; i < bbattery_NTests && bbattery_pVal[i] >= 0; ++i) {
      char name[128];
      snprintf(name, sizeof name, "%d %s", test, bbattery_TestNames[i]);
      report(name, bbattery_pVal[i]);
    }
  }
}

// Chi-square of the 2^16 patterns that 16 draws below or above a threshold make, over 2^25 disjoint patterns: draws
// that follow each other (apart = 1: neighbouring columns), or every eighth (a column of a lane: along lanes, steps or
// nodes, whatever the order puts next). Patterns expected less than ten times are counted together.
static void patterns(u32 threshold, int apart) {
  enum { kBits = 16, kAtOnce = 8 };
  const double n_patterns = (double)(1 << 25);
  static u32 count[1 << kBits];
  memset(count, 0, sizeof count);
  for (u32 i = 0; i < (1u << 25) / kAtOnce; ++i) {
    u32 pattern[kAtOnce] = {0};
    for (u32 k = 0; k < kBits * kAtOnce; k += 2) {
      const u32 word = words(), a = apart == 1 ? k / kBits : k % kAtOnce, b = apart == 1 ? a : a + 1;
      pattern[a] = pattern[a] << 1 | ((word & 0xFFFFu) < threshold);
      pattern[b] = pattern[b] << 1 | ((word >> 16) < threshold);
    }
    for (u32 k = 0; k < kAtOnce; ++k) ++count[pattern[k]];
  }
  double chi2 = 0, rare_count = 0, rare_expected = 0;
  long cells = 0;
  for (u32 pattern = 0; pattern < 1u << kBits; ++pattern) {
    const double p = threshold / 65536.0;
    double expected = n_patterns;
    for (int bit = 0; bit < kBits; ++bit) expected *= pattern >> bit & 1 ? p : 1 - p;
    if (expected < 10) {
      rare_count += count[pattern];
      rare_expected += expected;
      continue;
    }
    chi2 += (count[pattern] - expected) * (count[pattern] - expected) / expected;
    ++cells;
  }
  if (rare_expected > 0) {
    chi2 += (rare_count - rare_expected) * (rare_count - rare_expected) / rare_expected;
    ++cells;
  }
  char name[128];
  snprintf(name, sizeof name, "threshold %u, draws %d apart, %ld patterns", threshold, apart, cells);
  report(name, fbar_ChiSquare2(cells - 1, 12, chi2));
}
#endif

int main(int argc, char** argv) {
  u32 (*next)(void) = NULL;
  if (argc < 5) return fprintf(stderr, "see the head of rng.c\n"), 2;
  scramble = !strcmp(argv[2], "added") ? ADDED : !strcmp(argv[2], "folded") ? FOLDED : PRODUCT;
  for (u32 i = 0; i < sizeof kOrders / sizeof *kOrders; ++i)
    if (!strcmp(argv[3], kOrders[i].name)) order = kOrders + i;
  for (u32 i = 0; i < sizeof kViews / sizeof *kViews; ++i)
    if (!strcmp(argv[4], kViews[i].name)) next = kViews[i].next;
  if (!order || !next) return fprintf(stderr, "see the head of rng.c\n"), 2;
  if (!strcmp(argv[1], "words") && argc > 5) {
    for (long i = atol(argv[5]); i > 0; --i) printf("%08x\n", next());
    return 0;
  }
  if (!strcmp(argv[1], "write")) {
    static u32 out[1 << 14];
    do
      for (u32 i = 0; i < sizeof out / sizeof *out; ++i) out[i] = next();
    while (fwrite(out, sizeof out, 1, stdout) == 1);
    return 0;
  }
#ifdef TESTU01
  unif01_Gen* generator = unif01_CreateExternGenBits(argv[3], next);
  if (!strcmp(argv[1], "smallcrush")) return battery(generator, bbattery_RepeatSmallCrush, 10), 0;
  if (!strcmp(argv[1], "crush")) return battery(generator, bbattery_RepeatCrush, 96), 0;
  if (!strcmp(argv[1], "patterns")) {
    static const u32 thresholds[] = {655, 6554, 0x8000};  // 0.01, 0.1, 0.5
    for (int i = 0; i < 3; ++i) patterns(thresholds[i], 1), patterns(thresholds[i], 8);
    return 0;
  }
#endif
  return 2;
}
