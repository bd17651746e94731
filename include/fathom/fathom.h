// SPDX-License-Identifier: MIT
// Everything libfathom promises. Nothing outside include/fathom is part of the interface.
#pragma once

#include "fathom/backend.h"
#include "fathom/calibrate.h"
#include "fathom/calibration.h"
#include "fathom/capture.h"
#include "fathom/error.h"
#include "fathom/label_table.h"
#include "fathom/machine.h"
#include "fathom/method.h"
#include "fathom/model.h"
#include "fathom/plan.h"
#include "fathom/scan_table.h"
#include "fathom/session.h"
#include "fathom/session_folder.h"
#include "fathom/stats.h"
#include "fathom/step_bench.h"
#include "fathom/store.h"
#include "fathom/stored_session.h"
#include "fathom/types.h"
