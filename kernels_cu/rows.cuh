// What       which lattice node a row of a tile is
//
// Node       n(b, t, u) = node_start_b[b] + t U1_b + u
// Row        frame f = frame_start_b[b] + t has rows [row_start_f[f], row_start_f[f + 1]), of states from lo_f[f] on
#pragma once
#include "common.cuh"

struct Rows {
  const i64* row_start_f;    // [F + 1]
  const int* lo_f;           // [F]
  const int* utterance_f;    // [F]
  const i64* node_start_b;   // [B + 1]
  const i64* frame_start_b;  // [B + 1]
  const i64* state_start_b;  // [B + 1]
};

struct Tile {
  i64 row_begin, row_end;      // rows of the tile; row r lies at row r - row_begin of its buffers
  i64 frame_begin, frame_end;  // frames they belong to
};

struct Place {
  int b, t, u, states;  // states == U1_b
};

// The last i in [begin, end) with start(i) <= value, by all lanes of a warp together; begin is one.
template <class StartOf>
__device__ __forceinline__ i64 find_start(StartOf start, i64 value, i64 begin, i64 end) {
  const int lane = threadIdx.x % kWarp;
  while (end - begin > 1) {
    const i64 step = (end - begin + kWarp - 1) / kWarp;
    const i64 probe = begin + lane * step;
    const u32 below = __ballot_sync(kFullWarp, probe < end && start(probe) <= value);
    const i64 first = begin + (__popc(below) - 1) * step;  // lane 0 always holds
    end = first + step < end ? first + step : end;
    begin = first;
  }
  return begin;
}
__device__ __forceinline__ i64 find_frame(const Rows& rows, i64 row, i64 begin, i64 end) {
  return find_start([&](i64 i) { return rows.row_start_f[i]; }, row, begin, end);
}

__device__ __forceinline__ Place place_of(const Rows& rows, i64 frame, i64 row) {
  Place at;
  at.b = rows.utterance_f[frame];
  at.t = static_cast<int>(frame - rows.frame_start_b[at.b]);
  at.u = static_cast<int>(row - rows.row_start_f[frame]) + rows.lo_f[frame];
  at.states = static_cast<int>(rows.state_start_b[at.b + 1] - rows.state_start_b[at.b]);
  return at;
}

__device__ __forceinline__ i64 node_of(const Rows& rows, const Place& at) {
  return rows.node_start_b[at.b] + static_cast<i64>(at.t) * at.states + at.u;
}

// A row and its place; `next` walks to the row behind it without a search.
struct Cursor {
  i64 row, frame, frame_row_end;  // row_start_f[frame + 1]
  Place at;
  i64 node;
};

__device__ __forceinline__ void settle(const Rows& rows, Cursor& cursor) {
  cursor.frame_row_end = rows.row_start_f[cursor.frame + 1];
  cursor.at = place_of(rows, cursor.frame, cursor.row);
  cursor.node = node_of(rows, cursor.at);
}
__device__ __forceinline__ Cursor cursor_at(const Rows& rows, i64 row, i64 frame) {
  Cursor cursor;
  cursor.row = row;
  cursor.frame = frame;
  settle(rows, cursor);
  return cursor;
}
// Moves on by `step` rows; the target must exist.
__device__ __forceinline__ void advance(const Rows& rows, Cursor& cursor, int step) {
  cursor.row += step;
  if (cursor.row < cursor.frame_row_end) {
    cursor.at.u += step;
    cursor.node += step;
    return;
  }
  do ++cursor.frame;
  while (rows.row_start_f[cursor.frame + 1] <= cursor.row);
  settle(rows, cursor);
}
