// What       CUDA C++ on the CPU, for tests: a fiber per thread, blocks one after another
// Order      all fibers run until each waits or has ended; then the waits that are complete are released. A wait that
//            can never be complete is an error that says who waits where, not a hang
// Reverse    threads and blocks in reverse order: a missing barrier shows in one order or the other
// Memory     shared memory is NaN at the start of a block, or has guards around it under the address sanitizer
// Limits     no inline PTX, no waiting for another block, no textures, no half-precision intrinsics beyond the
//            host's own
#pragma once
#define FRNNT_CPU_SHIM 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <dlfcn.h>
#include <math.h>
#include <math_constants.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __grid_constant__
#undef __restrict__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __restrict__
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static __attribute__((section("shim_shared")))
extern char __start_shim_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_shim_shared[] __attribute__((weak, visibility("hidden")));
#endif
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(shim::dynamic_shared)

namespace shim {

using u32 = unsigned;
using u64 = unsigned long long;
constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStack = 512 << 10;
#else
constexpr size_t kStack = 128 << 10;
#endif

// Where a kernel calls one of the functions below.
struct Site {
  const char* file;
  int line;
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  bool operator==(const Site& other) const { return line == other.line && !strcmp(file, other.file); }
};

enum class State { ready, at_warp, at_block, ended };

struct Fiber {
  jmp_buf context;
  bool begun;         // whether there is a context to come back to
  void* fake_stack;   // the address sanitizer's
  uint3 thread;
  State state;
  const char* call;   // while it waits: what it called, where, for which lanes, with what
  Site site;
  u32 mask;
  u64 given;
  u64 taken;          // after the wait: given, untouched by this lane's next call
  u32 members;        // after the wait: the lanes that took part
};

// One set for all modules of a process: inline variables are unique in it.
inline Fiber fibers[kMaxThreads];
inline int n_fibers;  // threads of a block
inline Fiber* current;
inline jmp_buf scheduler;
inline dim3 grid, block;
inline uint3 block_index;
inline void* dynamic_shared;
inline int block_count;  // threads that gave __syncthreads_count and its like a true value
inline std::string message;
inline void (*entry)(const void*);
inline const void* parameters;

inline int index() { return static_cast<int>(current - fibers); }
inline int lane() { return index() % kWarp; }

// ---- switching -----------------------------------------------------------------------------------------------------
// A fiber begins on a stack of its own, and runs thread after thread; from there on each switch is a long jump, which
// unlike swapcontext costs no system call.
#ifdef __SANITIZE_ADDRESS__
inline void* scheduler_fake_stack;
inline const void* scheduler_stack;
inline size_t scheduler_stack_size;
// Past the sanitizer's own wrapper, which takes a long jump for the end of everything on this stack.
inline void (*const jump)(jmp_buf, int) =
    reinterpret_cast<void (*)(jmp_buf, int)>(dlsym(dlopen("libc.so.6", RTLD_LAZY), "_longjmp"));
#else
inline void (*const jump)(jmp_buf, int) = _longjmp;
#endif

inline char* stack_of(const Fiber& fiber) {
  static char* const stacks = static_cast<char*>(mmap(nullptr, kMaxThreads * kStack, PROT_READ | PROT_WRITE,
                                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return stacks + (&fiber - fibers) * kStack;
}

inline void leave() {  // from a fiber to the scheduler
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&current->fake_stack, scheduler_stack, scheduler_stack_size);
#endif
  if (!_setjmp(current->context)) jump(scheduler, 1);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(current->fake_stack, &scheduler_stack, &scheduler_stack_size);
#endif
}

inline void run_threads() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
  for (;;) {
    entry(parameters);
    current->state = State::ended;
    leave();
  }
}

inline void begin(Fiber& fiber) {
  fiber.begun = true;
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stack_of(fiber), kStack);  // a failed launch leaves its frames behind
#endif
  static ucontext_t context;  // this frame is never left: it must hold nothing
  getcontext(&context);
  context.uc_stack.ss_sp = stack_of(fiber);
  context.uc_stack.ss_size = kStack;
  makecontext(&context, run_threads, 0);
  setcontext(&context);
}

inline void enter(Fiber& fiber) {  // from the scheduler to a fiber
  current = &fiber;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, stack_of(fiber), kStack);
#endif
  if (!_setjmp(scheduler)) {
    if (fiber.begun) jump(fiber.context, 1);
    begin(fiber);
  }
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

// ---- errors --------------------------------------------------------------------------------------------------------
inline std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
inline std::string format(const char* pattern, ...) {
  char text[512];
  va_list values;
  va_start(values, pattern);
  vsnprintf(text, sizeof text, pattern, values);
  va_end(values);
  return text;
}

inline std::string where(const Fiber& fiber) {
  return format("block (%u, %u, %u) thread (%u, %u, %u)", block_index.x, block_index.y, block_index.z, fiber.thread.x,
                fiber.thread.y, fiber.thread.z);
}

// Ends the launch: no thread of it is entered again.
inline void fail(const std::string& what, Site site) {
  message = format("%s:%d: ", site.file, site.line) + where(*current) + ": " + what;
  leave();
}

inline std::string described(const Fiber& fiber) {
  if (fiber.state == State::ended) return "has ended";
  std::string text = format("waits in %s at %s:%d", fiber.call, fiber.site.file, fiber.site.line);
  return fiber.state == State::at_warp ? text + format(" for lanes %08x", fiber.mask) : text;
}

// Nothing can go on: names one thread of each kind of wait.
inline void report_deadlock() {
  message = "threads wait for one another:";
  std::vector<std::string> seen;
  for (int t = 0; t < n_fibers; ++t) {
    const Fiber& fiber = fibers[t];
    const std::string text = described(fiber);
    if (std::find(seen.begin(), seen.end(), text) != seen.end()) continue;
    seen.push_back(text);
    message += "\n  " + where(fiber) + " " + text;
  }
}

// ---- waits ---------------------------------------------------------------------------------------------------------
inline void wait_block(const char* call, bool value, Site site) {
  current->state = State::at_block;
  current->call = call, current->site = site, current->given = value;
  leave();
}

inline void wait_warp(const char* call, u32 mask, u64 value, Site site) {
  if (!(mask >> lane() & 1)) fail(format("calls %s for lanes %08x, not its own", call, mask), site);
  current->state = State::at_warp;
  current->call = call, current->site = site, current->mask = mask, current->given = value;
  leave();
}

// Lets go the lanes of every complete group of this warp: all live lanes of its mask, in the same call.
inline bool release_warp(int first) {
  const int n_lanes = std::min(kWarp, n_fibers - first);
  u32 live = 0;
  for (int l = 0; l < n_lanes; ++l)
    if (fibers[first + l].state != State::ended) live |= 1u << l;
  bool any = false;
  for (int leader = 0; leader < n_lanes; ++leader) {
    const Fiber& chief = fibers[first + leader];
    if (chief.state != State::at_warp) continue;
    const u32 members = chief.mask & live;
    bool complete = true;
    for (int l = 0; l < n_lanes; ++l) {
      const Fiber& fiber = fibers[first + l];
      if (!(members >> l & 1)) continue;
      complete &= fiber.state == State::at_warp && fiber.mask == chief.mask && fiber.site == chief.site &&
                  !strcmp(fiber.call, chief.call);
    }
    if (!complete) continue;
    any = true;
    for (int l = 0; l < n_lanes; ++l)
      if (members >> l & 1) {
        Fiber& fiber = fibers[first + l];
        fiber.state = State::ready, fiber.taken = fiber.given, fiber.members = members;
      }
  }
  return any;
}

// Lets go the block, if all that have not ended wait in the same call.
inline bool release_block() {
  const Fiber* chief = nullptr;
  block_count = 0;
  for (int t = 0; t < n_fibers; ++t) {
    const Fiber& fiber = fibers[t];
    if (fiber.state == State::ended) continue;
    if (!chief) chief = &fiber;
    if (fiber.state != State::at_block || !(fiber.site == chief->site) || strcmp(fiber.call, chief->call)) return false;
    block_count += fiber.given != 0;
  }
  for (int t = 0; t < n_fibers; ++t)
    if (fibers[t].state == State::at_block) fibers[t].state = State::ready;
  return true;
}

// ---- a launch ------------------------------------------------------------------------------------------------------
inline void poison_shared(size_t dynamic_bytes) {
  memset(dynamic_shared, 0xff, dynamic_bytes);
#ifndef __SANITIZE_ADDRESS__
  if (__start_shim_shared) memset(__start_shim_shared, 0xff, __stop_shim_shared - __start_shim_shared);
#endif
}

inline void run_block(bool reverse) {
  for (int t = 0; t < n_fibers; ++t) {
    const u32 x = t;
    fibers[t].thread = {x % block.x, x / block.x % block.y, x / (block.x * block.y)};
    fibers[t].state = State::ready;
  }
  for (;;) {
    int n_ended = 0;
    for (int i = 0; i < n_fibers; ++i) {
      Fiber& fiber = fibers[reverse ? n_fibers - 1 - i : i];
      if (fiber.state == State::ready) enter(fiber);
      if (!message.empty()) return;
      n_ended += fiber.state == State::ended;
    }
    if (n_ended == n_fibers) return;
    bool any = false;
    for (int first = 0; first < n_fibers; first += kWarp) any |= release_warp(first);
    if (!any && !release_block()) return report_deadlock();
  }
}

// What went wrong, or an empty string.
inline const char* launch(void (*kernel)(const void*), const void* record, const u32* grid_size, const u32* block_size,
                          size_t shared_bytes, bool reverse) {
  grid = {grid_size[0], grid_size[1], grid_size[2]}, block = {block_size[0], block_size[1], block_size[2]};
  const u64 n_blocks = static_cast<u64>(grid.x) * grid.y * grid.z;
  const u64 n_threads = static_cast<u64>(block.x) * block.y * block.z;
  message.clear();
  const bool lawful = n_blocks && n_threads && n_threads <= kMaxThreads && block.z <= 64;
  if (!lawful || grid.x >> 31 || grid.y > 65535 || grid.z > 65535) return "no lawful grid and block";
  entry = kernel, parameters = record;
  dynamic_shared = malloc(shared_bytes);
  n_fibers = static_cast<int>(n_threads);
  for (u64 i = 0; i < n_blocks && message.empty(); ++i) {
    const u64 number = reverse ? n_blocks - 1 - i : i;
    block_index = {static_cast<u32>(number % grid.x), static_cast<u32>(number / grid.x % grid.y),
                   static_cast<u32>(number / grid.x / grid.y)};
    poison_shared(shared_bytes);
    run_block(reverse);
  }
  free(dynamic_shared);
  if (!message.empty())
    for (Fiber& fiber : fibers) fiber.begun = false;  // they stand in the middle of a kernel
  return message.c_str();
}

// ---- what shuffles share -------------------------------------------------------------------------------------------
// Every lane gives `value`; this lane gets that of lane `source`, or keeps its own where `source` is negative.
template <class T>
T exchange(const char* call, u32 mask, T value, int source, Site site) {
  static_assert(sizeof(T) <= sizeof(u64) && std::is_trivially_copyable<T>::value, "at most 8 bytes");
  u64 bits = 0;
  memcpy(&bits, &value, sizeof(T));
  wait_warp(call, mask, bits, site);
  if (source < 0) return value;
  if (!(current->members >> source & 1)) fail(format("%s reads lane %d, which takes no part", call, source), site);
  memcpy(&value, &fibers[index() - lane() + source].taken, sizeof(T));
  return value;
}

inline u32 ballot(const char* call, u32 mask, bool value, Site site) {
  wait_warp(call, mask, value, site);
  u32 bits = 0;
  for (int l = 0; l < kWarp; ++l)
    if (current->members >> l & 1) bits |= static_cast<u32>(fibers[index() - lane() + l].taken) << l;
  return bits;
}

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace shim

// ---- CUDA's names --------------------------------------------------------------------------------------------------
#define threadIdx (shim::current->thread)
#define blockIdx shim::block_index
#define blockDim shim::block
#define gridDim shim::grid
#define warpSize shim::kWarp
#undef assert
#define assert(condition) \
  do { if (!(condition)) shim::fail("assertion failed: " #condition, shim::Site::here()); } while (false)

using shim::Site;

inline void __syncthreads(Site site = Site::here()) { shim::wait_block("__syncthreads", false, site); }
inline int __syncthreads_count(int value, Site site = Site::here()) {
  shim::wait_block("__syncthreads_count", value, site);
  return shim::block_count;
}
inline int __syncthreads_or(int value, Site site = Site::here()) {
  shim::wait_block("__syncthreads_or", value, site);
  return shim::block_count != 0;
}
inline int __syncthreads_and(int value, Site site = Site::here()) {
  shim::wait_block("__syncthreads_and", !value, site);
  return shim::block_count == 0;
}
inline void __syncwarp(unsigned mask = ~0u, Site site = Site::here()) { shim::wait_warp("__syncwarp", mask, 0, site); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __trap() { shim::fail("trap", Site::here()); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, Site site = Site::here()) {
  const int segment = shim::lane() & ~(width - 1);
  return shim::exchange("__shfl_sync", mask, value, segment | (source & (width - 1)), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, Site site = Site::here()) {
  const int source = shim::lane() ^ flip, last = shim::lane() | (width - 1);
  return shim::exchange("__shfl_xor_sync", mask, value, source <= last ? source : -1, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned step, int width = 32, Site site = Site::here()) {
  const int source = shim::lane() + static_cast<int>(step), last = shim::lane() | (width - 1);
  return shim::exchange("__shfl_down_sync", mask, value, source <= last ? source : -1, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned step, int width = 32, Site site = Site::here()) {
  const int source = shim::lane() - static_cast<int>(step), first = shim::lane() & ~(width - 1);
  return shim::exchange("__shfl_up_sync", mask, value, source >= first ? source : -1, site);
}
inline unsigned __ballot_sync(unsigned mask, int value, Site site = Site::here()) {
  return shim::ballot("__ballot_sync", mask, value, site);
}
inline int __any_sync(unsigned mask, int value, Site site = Site::here()) {
  return shim::ballot("__any_sync", mask, value, site) != 0;
}
inline int __all_sync(unsigned mask, int value, Site site = Site::here()) {
  return shim::ballot("__all_sync", mask, !value, site) == 0;
}

template <class T>
T atomicAdd(T* to, T value) {
  static_assert(std::is_integral<T>::value, "sums of floats would depend on their order");
  const T before = *to;
  *to = before + value;
  return before;
}
template <class T>
T __ldg(const T* from) { return *from; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<shim::u64>(a) * b >> 32; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return ((static_cast<shim::u64>(high) << 32 | low) << (shift & 31)) >> 32;
}
inline float __int_as_float(int x) { return shim::bits_as<float>(x); }
inline int __float_as_int(float x) { return shim::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return shim::bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return shim::bits_as<float>(x); }
inline double __longlong_as_double(long long x) { return shim::bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return shim::bits_as<long long>(x); }

using std::max;
using std::min;
#define __expf expf
#define __logf logf
#define __log2f log2f
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float normcdf(float x) { return 0.5f * erfcf(x * -0.70710678f); }
inline double normcdf(double x) { return 0.5 * erfc(x * -0.70710678118654752); }

// A function by which the host launches a kernel of one by-value parameter struct.
template <auto kernel>
struct Entry;
template <class P, void (*kernel)(P)>
struct Entry<kernel> {
  static constexpr size_t kBytes = sizeof(P);
  static void call(const void* record) { kernel(*static_cast<const P*>(record)); }
};
#define SHIM_ENTRY(name)                                                                                        \
  extern "C" const char* shim_##name(const void* record, size_t bytes, const unsigned* grid, const unsigned* block, \
                                     size_t shared_bytes, int reverse) {                                        \
    using ThisEntry = Entry<&name>;                                                                             \
    if (bytes != ThisEntry::kBytes) return "the record is not of the struct's size";                            \
    return shim::launch(ThisEntry::call, record, grid, block, shared_bytes, reverse);                           \
  }
