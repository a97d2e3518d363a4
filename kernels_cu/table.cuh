// What       the loss as a table: softmax groups, columns, arcs (flash_rnnt_cupy/topology.py)
// Constants  GROUP_STARTS, GROUP_STOPS        logits [start, stop) of a group; stop -1 means V
//            COLUMN_LOGITS, COLUMN_GROUPS     which logit a column reads: kBlank, kLabel or a number
//            ARC_DT, ARC_DU, ARC_COLUMNS      arcs; ARC_COLUMNS is a bit set
//            ARC_CONSTANTS, ARC_MAY_END, ARC_REACH (the longest dt + du)
#pragma once

constexpr int kBlank = -1, kLabel = -2;
constexpr int kGroupStart[] = GROUP_STARTS, kGroupStop[] = GROUP_STOPS;
constexpr int kColumnLogit[] = COLUMN_LOGITS, kColumnGroup[] = COLUMN_GROUPS;
constexpr int kArcDt[] = ARC_DT, kArcDu[] = ARC_DU;
constexpr unsigned kArcColumns[] = ARC_COLUMNS;
constexpr double kArcConstant[] = ARC_CONSTANTS;
constexpr bool kArcMayEnd[] = ARC_MAY_END;
constexpr int kGroups = sizeof(kGroupStart) / sizeof(int);
constexpr int kColumns = sizeof(kColumnLogit) / sizeof(int);
constexpr int kArcs = sizeof(kArcDt) / sizeof(int);
constexpr int kReach = ARC_REACH;
